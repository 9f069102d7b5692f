"""Caches never go back in time, and a relist finds what a watch missed; on virtual time."""

import asyncio
import itertools

import pytest
from kvscaler_operator.cache import ObjectCache
from kvscaler_operator.gateways.kube import ForbiddenError, UnavailableError
from kvscaler_operator.relist import Relist
from kvscaler_operator.resources import DEPLOYMENTS, PODS, SERVICES, Object, Resource, name_of

from tests.controller.fakes import FakeKube, made
from tests.controller.virtual_time import run


def in_loop(body: object) -> None:
    async def scenario() -> None:
        body()  # type: ignore[operator]

    run(scenario())


def test_an_older_version_is_refused() -> None:
    def body() -> None:
        cache = ObjectCache(PODS, "service")
        assert cache.observe(made("a", "1", 10, service="x"))
        assert not cache.observe(made("a", "1", 9, service="x"))
        assert not cache.observe(made("a", "1", 10, service="x"))
        assert cache.observe(made("a", "1", 11, service="y"))
        assert cache.labelled("x") == []
        assert [name_of(o) for o in cache.labelled("y")] == ["a"]

    in_loop(body)


def test_a_deleted_object_stays_deleted_for_an_older_list() -> None:
    def body() -> None:
        cache = ObjectCache(PODS, "service")
        cache.observe(made("a", "1", 10, service="x"))
        assert cache.remove("1", 12) is not None
        assert not cache.observe(made("a", "1", 11, service="x"))
        assert len(cache) == 0

    in_loop(body)


def test_an_object_that_lost_its_label_comes_back_when_it_has_it_again() -> None:
    def body() -> None:
        cache = ObjectCache(PODS, "service")
        cache.observe(made("a", "1", 10, service="x"))
        cache.remove("1", 12)  # a watch by label says DELETED
        assert cache.observe(made("a", "1", 13, service="x"))
        assert [name_of(o) for o in cache.labelled("x")] == ["a"]

    in_loop(body)


def test_a_delete_that_is_older_than_what_is_known_changes_nothing() -> None:
    def body() -> None:
        cache = ObjectCache(PODS)
        cache.observe(made("a", "1", 20))
        assert cache.remove("1", 15) is None
        assert cache.by_uid("1") is not None

    in_loop(body)


def test_a_name_used_again_replaces_its_predecessor() -> None:
    def body() -> None:
        cache = ObjectCache(PODS, "service")
        cache.observe(made("a", "1", 10, service="x"))
        assert cache.observe(made("a", "2", 20, service="x"))
        assert cache.by_uid("1") is None
        assert not cache.observe(made("a", "1", 10, service="x"))
        assert len(cache.labelled("x")) == 1

    in_loop(body)


def test_who_wrote_a_field_is_kept_only_where_it_is_read() -> None:
    def body() -> None:
        for kind, kept in ((PODS, False), (DEPLOYMENTS, True)):
            cache = ObjectCache(kind, "service")
            obj = made("a", "1", 10, service="x")
            obj["metadata"]["managedFields"] = [{"manager": "kubelet"}]
            cache.observe(obj)
            (found,) = cache.all()
            assert ("managedFields" in found["metadata"]) is kept

    in_loop(body)


class Harness:
    """A cache, a fake API server and the changes that a relist reported."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.cache = ObjectCache(PODS, "service")
        self.changed: list[str] = []
        self.relist = Relist(
            self.kube,  # type: ignore[arg-type]
            {PODS: self.cache},
            {},
            (),
            self._note,
        )

    def _note(self, _: Resource, obj: Object) -> None:
        self.changed.append(name_of(obj))

    def store(self, name: str) -> Object:
        obj = made(name, f"uid-{name}", 0, service="x")
        return self.kube.put(PODS, obj)


def test_ghosts_of_a_watch_gap_are_found() -> None:
    async def scenario() -> None:
        h = Harness()
        for index in range(100):
            h.cache.observe(h.store(f"p{index}"))
        for index in range(10):
            h.kube.drop(PODS, made(f"p{index}", f"uid-p{index}", 0))
        new = h.store("new")
        assert await h.relist.run_once() == 11
        assert len(h.cache) == 91
        assert h.cache.by_uid(new["metadata"]["uid"]) is not None
        assert sorted(h.changed) == sorted([f"p{i}" for i in range(10)] + ["new"])
        assert await h.relist.run_once() == 0

    run(scenario())


def test_an_event_that_was_only_late_is_no_missed_one() -> None:
    async def scenario() -> None:
        h = Harness()
        h.cache.observe(h.store("a"))
        late = h.store("b")
        asyncio.get_running_loop().call_later(2.0, h.cache.observe, late)
        assert await h.relist.run_once() == 0
        assert h.changed == []

    run(scenario())


def test_what_is_created_after_the_list_is_not_taken_for_gone() -> None:
    async def scenario() -> None:
        h = Harness()
        h.cache.observe(h.store("a"))
        h.cache.observe(made("young", "uid-young", h.kube.version + 50, service="x"))
        assert await h.relist.run_once() == 0
        assert len(h.cache) == 2

    run(scenario())


def test_a_deaf_watch_grows_old_and_a_good_one_does_not() -> None:
    async def scenario() -> None:
        h = Harness()
        h.relist.start_clock()
        for _ in range(5):
            await asyncio.sleep(60)
            await h.relist.run_once()
        assert h.relist.watch_age_seconds() < 10
        for index in range(5):
            h.store(f"unseen-{index}")
            await asyncio.sleep(60)
            await h.relist.run_once()
        assert h.relist.watch_age_seconds() > 300

    run(scenario())


def test_a_failed_list_neither_ends_the_relist_nor_empties_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        h = Harness()
        h.cache.observe(h.store("a"))

        async def refuse(_: str) -> None:
            raise UnavailableError(503, "", "away", "GET pods")

        h.kube.fault = refuse
        assert await h.relist.run_once() == 0
        assert len(h.cache) == 1
        assert h.relist.passes == 0

    run(scenario())
    assert "Relist of pods failed" in caplog.text


def test_the_first_list_waits_for_a_server_that_is_away_and_for_as_long_as_it_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        h = Harness()
        h.store("a")
        times: list[float] = []

        async def away(_: str) -> None:
            times.append(asyncio.get_running_loop().time())
            if len(times) < 4:
                error = UnavailableError(429, "", "busy", "GET pods")
                error.retry_after_seconds = 10.0 if len(times) == 2 else None
                raise error

        h.kube.fault = away
        await h.relist.fill()
        assert [b - a for a, b in itertools.pairwise(times)] == [0.5, 10.0, 2.0]
        assert len(h.cache) == 1
        assert h.changed == ["a"]

    run(scenario())
    assert "The first list of pods failed, tried again in 10.0 s: GET pods: busy" in caplog.text


def test_the_first_list_does_not_wait_for_a_right_that_is_missing() -> None:
    async def scenario() -> None:
        h = Harness()

        async def refuse(_: str) -> None:
            raise ForbiddenError(403, "Forbidden", "cannot list pods", "GET pods")

        h.kube.fault = refuse
        with pytest.raises(ForbiddenError, match="cannot list pods"):
            await h.relist.fill()
        assert len(h.kube.calls) == 1

    run(scenario())


def test_late_events_of_many_kinds_are_waited_for_once() -> None:
    async def scenario() -> None:
        kube, took = FakeKube(), []
        kinds = (PODS, DEPLOYMENTS, SERVICES)
        caches = {kind: ObjectCache(kind, "service") for kind in kinds}
        relist = Relist(
            kube,  # type: ignore[arg-type]
            caches,
            {},
            (),
            lambda *_: None,
            settle_seconds=5.0,
            took=took.append,
        )
        for kind in kinds:
            kube.put(kind, made("a", f"uid-{kind.plural}", 0, service="x"))
        assert await relist.run_once() == 3
        assert [len(cache) for cache in caches.values()] == [1, 1, 1]
        assert took == [5.0]

    run(scenario())
