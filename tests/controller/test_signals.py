"""What the store of signals believes, and by whose clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol.state import OccupancyReport, TrafficCounters
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import AbsenceReason, Absent, Present
from kvscaler_api.service import InferenceService
from kvscaler_operator.assess import assess
from kvscaler_operator.belief import believed
from kvscaler_operator.gateways.server_clock import SLACK_SECONDS, ServerClock, date_of
from kvscaler_operator.observe import Replica
from kvscaler_operator.resources import Object
from kvscaler_operator.signals import SignalPath, SignalStore

from tests.controller.sidecars import BLOCKS, make_state
from tests.controller.world import service_object

DIRECT, PROMETHEUS = SignalPath.DIRECT, SignalPath.PROMETHEUS
NOW = 10_000.0


class Store:
    """One replica's signals."""

    def __init__(self) -> None:
        self.signals = SignalStore([DIRECT, PROMETHEUS], max_age_seconds=20.0)

    def hear(self, path: SignalPath, at: float, running: int = 0, now: float | None = None) -> bool:
        occupancy = make_state("s", "p", "chat-1").occupancy
        assert isinstance(occupancy, OccupancyReport)
        state = make_state(
            "s", "p", "chat-1",
            started_at=1.0,
            observed_at=at,
            occupancy=occupancy.model_copy(update={"running_requests": running}),
        )  # fmt: skip
        return self.signals.observe("s", "p", path, Present(state, path, at), now)

    def miss(self, path: SignalPath, words: str) -> None:
        self.signals.observe("s", "p", path, Absent(AbsenceReason.MISSING, path, words), NOW)

    def running(self, now: float) -> int:
        found = self.signals.state("s", "p", now)
        assert isinstance(found, Present), found
        assert found.value.occupancy is not None
        return found.value.occupancy.running_requests

    def absence(self, now: float) -> Absent:
        found = self.signals.state("s", "p", now)
        assert isinstance(found, Absent), found
        return found


def test_a_replica_that_answers_speaks_for_itself() -> None:
    store = Store()
    assert store.hear(DIRECT, NOW, running=1)
    assert not store.hear(PROMETHEUS, NOW + 1.0, running=9, now=NOW + 1.0)
    assert store.running(NOW + 1.0) == 1
    # It fell silent: what was scraped meanwhile is next.
    assert store.hear(PROMETHEUS, NOW + 6.0, running=2, now=NOW + 7.0)
    assert store.running(NOW + 7.0) == 2
    assert store.hear(DIRECT, NOW + 8.0, running=3)
    assert store.running(NOW + 8.0) == 3


def test_a_scrape_from_the_future_is_refused_whatever_it_says() -> None:
    store = Store()
    store.hear(PROMETHEUS, NOW + 3_600.0, running=9, now=NOW)
    found = store.absence(NOW)
    assert found.reason is AbsenceReason.STALE
    assert "stamped 1970-01-01T03:46:40Z, ahead of our clock" in found.detail
    assert store.hear(DIRECT, NOW + 1.0, running=1)
    assert store.running(NOW + 1.0) == 1


def test_scrapes_go_on_after_our_own_clock_was_set_back() -> None:
    store = Store()
    store.hear(PROMETHEUS, NOW, running=1, now=NOW)
    assert store.hear(PROMETHEUS, NOW - 3_600.0, running=2, now=NOW - 3_600.0)
    assert store.running(NOW - 3_600.0) == 2


def test_the_slower_of_two_servers_takes_nothing_back() -> None:
    """A balancer before two servers: one is half a minute late, and our clock has not moved."""
    store = Store()
    store.hear(PROMETHEUS, NOW, running=1, now=NOW)
    assert not store.hear(PROMETHEUS, NOW - 30.0, running=2, now=NOW + 1.0)
    assert store.running(NOW + 1.0) == 1


def test_a_stale_value_says_why_nothing_followed_it() -> None:
    store = Store()
    store.hear(DIRECT, NOW)
    store.miss(DIRECT, "GET /state answered 404")
    found = store.absence(NOW + 30.0)
    assert found.reason is AbsenceReason.STALE
    assert found.detail == "last seen 1970-01-01T02:46:40Z; since then GET /state answered 404"
    assert store.absence(NOW + 60.0) == found, "a standing fault is no news"


def test_a_replica_that_fell_silent_does_not_answer_directly() -> None:
    store = Store()
    store.hear(DIRECT, NOW)
    assert store.signals.answers_directly("s", "p", NOW + 19.0)
    assert not store.signals.answers_directly("s", "p", NOW + 21.0)


@given(
    offset=st.floats(-1e6, 1e6),
    latencies=st.lists(st.floats(0.0, 3.0), min_size=2, max_size=20),
)
def test_one_scrape_has_one_time_however_often_it_is_read(
    offset: float, latencies: list[float]
) -> None:
    clock = ServerClock()
    offsets = set()
    for step, latency in enumerate(latencies):
        before = NOW + step
        server = before + latency / 2 - offset
        clock.compare(float(int(server)), before, before + latency)
        offsets.add(clock.offset_seconds)
        assert abs(clock.offset_seconds - offset) <= SLACK_SECONDS + 3.0 + 1.0
    assert len(offsets) <= 2


def test_clocks_in_step_are_left_alone_and_a_changed_one_is_told_of_once() -> None:
    clock = ServerClock()
    clock.compare(NOW - 1.0, NOW, NOW + 0.1)
    assert (clock.offset_seconds, clock.news()) == (0.0, None)
    clock.compare(NOW + 86_400.0, NOW, NOW + 0.1)
    assert clock.offset_seconds == -86_400.0
    assert clock.news() == -86_400.0
    for _ in range(3):
        clock.compare(NOW, NOW, NOW + 0.1)
        assert clock.offset_seconds == 0.0
        clock.compare(NOW + 86_400.0, NOW, NOW + 0.1)
        assert clock.news() is None


@pytest.mark.parametrize("header", [None, "", "yesterday", "Mon, 99 Foo 2026 25:61:61 GMT"])
def test_a_date_that_can_not_be_read_is_none(header: str | None) -> None:
    assert date_of(header) is None


def replica(uid: str, revision: str = "rs", memory: str = "2Gi") -> Replica:
    engine = {"name": "engine", "resources": {"limits": {"memory": memory}}}
    pod: Object = {
        "metadata": {"uid": uid, "name": uid},
        "spec": {"containers": [engine]},
    }
    return Replica(pod, ReplicaPhase.READY, 0.0, revision)


def doubted(pools: dict[Any, int], memory: str = "2Gi") -> set[str]:
    """UIDs that are not believed; keys are UIDs, or (UID, revision, memory of the Pod)."""
    replicas = [replica(*(k if isinstance(k, tuple) else (k,))) for k in pools]
    states = {}
    for one, blocks in zip(replicas, pools.values(), strict=True):
        state = make_state("s", one.uid, one.name)
        assert state.capacity is not None
        capacity = state.capacity.model_copy(update={"kv_blocks": blocks})
        states[one.uid] = Present(state.model_copy(update={"capacity": capacity}), "direct", NOW)
    obj = service_object("ns")
    engine = {"name": "engine", "resources": {"limits": {"memory": memory}}}
    obj["spec"]["template"]["spec"]["containers"] = [engine]
    assessment = assess(InferenceService.from_wire(obj).spec, None, None)
    deployment = {"spec": {"template": {"spec": {"containers": [engine]}}}}
    found = believed(deployment, replicas, states, assessment)
    for signal in found.values():
        assert isinstance(signal, Present) or signal.reason is AbsenceReason.MISMATCHED
    return {uid for uid, signal in found.items() if isinstance(signal, Absent)}


def test_one_liar_among_many_sizes_nothing() -> None:
    honest = {f"p{i}": BLOCKS for i in range(9)}
    assert doubted({**honest, "liar": BLOCKS // 50}) == {"liar"}
    assert doubted({**honest, "liar": BLOCKS * 3}) == {"liar"}
    assert doubted({**honest, "other": BLOCKS * 3 // 2}) == set()
    assert doubted({"a": BLOCKS, "b": BLOCKS, "liar": BLOCKS * 3}) == {"liar"}
    # One word against another: the budget has to tell.
    assert doubted({"a": BLOCKS, "b": BLOCKS * 3}) == set()


def test_a_single_replica_is_judged_by_its_budget() -> None:
    assert doubted({"p": 996 // 50}) == {"p"}
    assert doubted({"p": 996 * 50}) == {"p"}
    assert doubted({"p": 0}) == {"p"}
    assert doubted({"p": 700}) == set()


def test_a_pod_of_another_template_is_judged_by_neither_budget_nor_its_successors() -> None:
    """While a fleet moves from 64 GiB to 2 GiB, both kinds of Pods are right."""
    old = {(f"old{i}", "rs-1", "64Gi"): 87_000 for i in range(3)}
    new = {(f"new{i}", "rs-2", "2Gi"): 990 for i in range(3)}
    assert doubted({**old, **new}) == set()


def test_counters_of_a_replica_that_is_not_believed_are_traffic_all_the_same() -> None:
    store = Store()
    state = make_state("s", "p", "chat-1", traffic=TrafficCounters(arrivals=7))
    assert store.signals.observe("s", "p", DIRECT, Present(state, DIRECT, NOW))
    window = store.signals.window("s", ["p"], NOW)
    assert isinstance(window, Present)
    assert window.value.coverage == 1.0
