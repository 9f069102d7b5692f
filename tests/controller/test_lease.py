"""One operator acts at a time, whatever the API server does; on virtual time."""

import asyncio
import random
from typing import Any

import pytest
from kvscaler_operator.gateways.kube import ConflictError, UnavailableError
from kvscaler_operator.lease import LeaseElector, LeaseLostError
from kvscaler_operator.resources import LEASES

from tests.controller.fakes import FakeKube
from tests.controller.virtual_time import run


def elector(kube: FakeKube, identity: str) -> LeaseElector:
    return LeaseElector(
        kube,  # type: ignore[arg-type]
        "ns",
        "operator",
        identity,
        duration_seconds=15,
        deadline_seconds=10,
        retry_seconds=2,
        randomness=random.Random(identity),
    )


class Work:
    """Work that notes from when to when it ran."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended: float | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        try:
            await asyncio.sleep(100_000)
        finally:
            self.ended = loop.time()


async def stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def holder(kube: FakeKube) -> str:
    return str(kube.objects[LEASES.plural, "ns", "operator"]["spec"]["holderIdentity"])


def test_it_creates_the_lease_that_is_not_there_and_renews_it() -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        one = elector(kube, "one")
        task = asyncio.create_task(one.run(work.run()))
        await asyncio.sleep(60)
        assert holder(kube) == "one"
        assert one.held
        assert work.began is not None and work.ended is None
        assert sum(verb == "PUT" for verb, _ in kube.calls) >= 25
        await stop(task)

    run(scenario())


def test_it_hands_the_lease_back_so_that_the_next_one_need_not_wait() -> None:
    async def scenario() -> None:
        kube, work, next_work = FakeKube(), Work(), Work()
        task = asyncio.create_task(elector(kube, "one").run(work.run()))
        await asyncio.sleep(5)
        second = asyncio.create_task(elector(kube, "two").run(next_work.run()))
        await asyncio.sleep(30)
        assert next_work.began is None
        await stop(task)
        released = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert next_work.began is not None and next_work.began - released < 5
        assert work.ended is not None and work.ended <= next_work.began
        await stop(second)

    run(scenario())


def test_a_dead_holder_is_replaced_after_the_duration_as_seen_by_the_next() -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        kube.put(
            LEASES,
            {
                "metadata": {"namespace": "ns", "name": "operator"},
                # The dead holder's clock was an hour ahead: it must not matter.
                "spec": {
                    "holderIdentity": "dead",
                    "leaseDurationSeconds": 15,
                    "renewTime": "2099-01-01T00:00:00.000000Z",
                },
            },
        )
        begun = asyncio.get_running_loop().time()
        task = asyncio.create_task(elector(kube, "two").run(work.run()))
        await asyncio.sleep(60)
        assert work.began is not None
        assert 15 <= work.began - begun <= 20
        assert kube.objects[LEASES.plural, "ns", "operator"]["spec"]["leaseTransitions"] == 1
        await stop(task)

    run(scenario())


@pytest.mark.parametrize("kind", ["hangs", "refuses", "breaks"])
def test_who_cannot_renew_stops_before_anyone_else_may_begin(kind: str) -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        task = asyncio.create_task(elector(kube, "one").run(work.run()))
        await asyncio.sleep(30)
        last_renewal = asyncio.get_running_loop().time()

        async def fault(_: str) -> None:
            if kind == "hangs":
                await asyncio.sleep(3_600)
            if kind == "refuses":
                raise UnavailableError(0, "ClientConnectorError", "refused", "GET lease")
            raise RuntimeError("an error that nobody thought of")

        kube.fault = fault
        with pytest.raises(LeaseLostError, match="another operator may act now"):
            await task
        assert work.ended is not None
        assert work.ended - last_renewal < 15

    run(scenario())


def test_a_lease_taken_by_someone_else_is_lost() -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        task = asyncio.create_task(elector(kube, "one").run(work.run()))
        await asyncio.sleep(10)
        lease = kube.objects[LEASES.plural, "ns", "operator"]
        lease["spec"]["holderIdentity"] = "two"
        kube.put(LEASES, lease)
        with pytest.raises(LeaseLostError):
            await task
        assert holder(kube) == "two"

    run(scenario())


def test_a_conflict_on_every_second_write_costs_no_lease() -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        puts = 0

        async def conflict(verb: str) -> None:
            nonlocal puts
            if verb != "GET":
                puts += 1
                if puts % 2:
                    raise ConflictError(409, "Conflict", "modified", "PUT lease")

        kube.fault = conflict
        task = asyncio.create_task(elector(kube, "one").run(work.run()))
        await asyncio.sleep(60)
        assert work.began is not None and work.ended is None
        # Each renewal took its second try at once: as many succeeded as without the conflicts.
        assert puts >= 50
        await stop(task)

    run(scenario())


def test_short_outages_are_survived() -> None:
    async def scenario() -> None:
        kube, work = FakeKube(), Work()
        task = asyncio.create_task(elector(kube, "one").run(work.run()))
        await asyncio.sleep(10)

        async def refuse(_: str) -> None:
            raise UnavailableError(503, "", "starting", "GET lease")

        kube.fault = refuse
        await asyncio.sleep(6)
        kube.fault = None
        await asyncio.sleep(60)
        assert not task.done()
        await stop(task)

    run(scenario())


def test_an_error_of_the_work_passes_through_and_releases() -> None:
    async def scenario() -> None:
        kube = FakeKube()

        async def broken() -> None:
            await asyncio.sleep(5)
            raise LookupError("broken work")

        with pytest.raises(LookupError, match="broken work"):
            await elector(kube, "one").run(broken())
        assert holder(kube) == ""

    run(scenario())


def test_deadlines_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="retry < renew deadline < duration"):
        LeaseElector(FakeKube(), "ns", "l", "i", duration_seconds=5, deadline_seconds=10)  # type: ignore[arg-type]
