"""When status is written, and what in it is a change; on virtual time."""

import asyncio
import copy
from typing import Any

from kvscaler_operator.resources import Object
from kvscaler_operator.status import (
    URGENT_BURST,
    URGENT_SECONDS,
    StatusPacer,
    essence,
    two_digits,
)

from tests.controller.virtual_time import run


def status(**changes: Any) -> Object:
    base: Object = {
        "replicas": 1,
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "ReplicasReady", "message": "1 of 1",
             "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
        "decision": {"desiredReplicas": 1, "bindingConstraint": "Memory", "reason": "Steady",
                     "message": "m", "time": "t", "inputs": [{"name": "a", "value": "1",
                     "ageSeconds": 1}]},
        "traffic": {"requestsPerSecond": "1"},
    }  # fmt: skip
    return {**copy.deepcopy(base), **changes}


async def writes(pacer: StatusPacer, states: Any, seconds: float, *, quiet: bool = False) -> int:
    """Writes over a time in which a new status is offered each second."""
    written, count = status(), 0
    for second in range(int(seconds)):
        offered = states(second)
        if pacer.wait_seconds(written, offered, quiet=quiet) == 0.0:
            written, count = offered, count + 1
        await asyncio.sleep(1)
    return count


def test_nothing_new_is_never_written() -> None:
    async def scenario() -> None:
        assert await writes(StatusPacer.fresh(), lambda _: status(), 600) == 0

    run(scenario())


def test_times_and_ages_are_nothing_new() -> None:
    def later(second: int) -> Object:
        changed = status()
        changed["conditions"][0]["lastTransitionTime"] = f"{second}"
        changed["decision"]["time"] = f"{second}"
        changed["decision"]["inputs"][0]["ageSeconds"] = second
        return changed

    async def scenario() -> None:
        assert await writes(StatusPacer.fresh(), later, 600) == 0

    run(scenario())


def test_steady_traffic_costs_at_most_two_writes_a_minute() -> None:
    async def scenario() -> None:
        count = await writes(
            StatusPacer.fresh(), lambda s: status(traffic={"requestsPerSecond": str(s)}), 600
        )
        assert 10 <= count <= 20

    run(scenario())


def test_a_decision_is_written_at_once() -> None:
    async def scenario() -> None:
        pacer = StatusPacer.fresh()
        before = status(traffic={"requestsPerSecond": "9"})
        assert pacer.wait_seconds(status(), before, quiet=False) == 0.0
        after = status()
        after["decision"]["desiredReplicas"] = 4
        assert pacer.wait_seconds(before, after, quiet=False) == 0.0

    run(scenario())


def test_a_flapping_cause_cannot_flood() -> None:
    async def scenario() -> None:
        count = await writes(StatusPacer.fresh(), lambda s: status(replicas=s), 600)
        assert count <= 10 + 600 / 6 + 600 / 30

    run(scenario())


def test_what_matters_waits_for_its_turn_only_however_much_was_written_before() -> None:
    async def scenario() -> None:
        pacer = StatusPacer.fresh()
        for replicas in range(2, 2 + URGENT_BURST):
            wait = pacer.wait_seconds(status(), status(replicas=replicas), quiet=False)
            assert wait == 0.0
        last = status(replicas=100)
        wait = pacer.wait_seconds(status(), last, quiet=False)
        assert wait is not None and 0 < wait <= URGENT_SECONDS
        await asyncio.sleep(wait)
        assert pacer.wait_seconds(status(), last, quiet=False) == 0.0

    run(scenario())


def test_after_traffic_ends_figures_are_written_once_more() -> None:
    def decaying(second: int) -> Object:
        return status(traffic={"requestsPerSecond": str(600 - second)})

    async def scenario() -> None:
        assert await writes(StatusPacer.fresh(), decaying, 600, quiet=True) == 1

    run(scenario())


def test_a_message_is_told_even_without_traffic() -> None:
    async def scenario() -> None:
        pacer = StatusPacer.fresh()
        assert pacer.wait_seconds(status(), status(traffic={"a": 1}), quiet=True) == 0.0
        await asyncio.sleep(60)
        told = status(traffic={"a": 2})
        told["conditions"][0]["message"] = "chat-1: ErrImagePull"
        assert pacer.wait_seconds(status(traffic={"a": 1}), told, quiet=True) == 0.0

    run(scenario())


def test_the_essence_is_what_a_reader_acts_on() -> None:
    other = status(traffic={})
    other["conditions"][0]["message"] = "other words"
    other["decision"]["message"] = "other words"
    assert essence(status()) == essence(other)
    other["conditions"][0]["reason"] = "RollingOut"
    assert essence(status()) != essence(other)


def test_figures_have_two_digits() -> None:
    assert [two_digits(v) for v in (0, 7, 123, 9_876, 1_049_000)] == [0, 7, 120, 9_900, 1_000_000]
