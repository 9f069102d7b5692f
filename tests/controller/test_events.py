"""Events are aggregated and bounded; on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from kvscaler_operator.events import EventRecorder
from kvscaler_operator.gateways.kube import UnavailableError
from kvscaler_operator.resources import EVENTS

from tests.controller.fakes import FakeKube, made
from tests.controller.virtual_time import run

POD = made("p", "uid-p", 7)


def scenario_of(
    body: Callable[[FakeKube, EventRecorder], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        kube = FakeKube()
        recorder = EventRecorder(kube, "operator-1")  # type: ignore[arg-type]
        task = asyncio.create_task(recorder.run())
        await body(kube, recorder)
        task.cancel()

    run(scenario())


def posted(kube: FakeKube) -> list[dict[str, object]]:
    return [obj for (plural, _, _), obj in kube.objects.items() if plural == EVENTS.plural]


def test_an_event_says_what_about_which_object() -> None:
    async def body(kube: FakeKube, recorder: EventRecorder) -> None:
        recorder.record(POD, "ScaledUp", "1 -> 3", action="Scale")
        await recorder.flush(5)
        (event,) = posted(kube)
        assert (event["reason"], event["note"], event["type"]) == ("ScaledUp", "1 -> 3", "Normal")
        assert event["reportingController"] == "kvscaler-operator"
        assert event["regarding"]["uid"] == "uid-p"  # type: ignore[index]

    scenario_of(body)


def test_repetitions_within_two_minutes_are_one_event() -> None:
    async def body(kube: FakeKube, recorder: EventRecorder) -> None:
        for _ in range(100):
            recorder.record(POD, "NameTaken", "taken", warning=True)
            await asyncio.sleep(1)
        await recorder.flush(5)
        assert len(posted(kube)) == 1
        assert [verb for verb, _ in kube.calls] == ["POST"]

    scenario_of(body)


def test_later_repetitions_count_up_the_same_event() -> None:
    async def body(kube: FakeKube, recorder: EventRecorder) -> None:
        for _ in range(10):
            recorder.record(POD, "NameTaken", "taken", warning=True)
            await asyncio.sleep(60)
        await recorder.flush(5)
        (event,) = posted(kube)
        assert event["series"]["count"] >= 9  # type: ignore[index]
        assert sum(verb == "PATCH" for verb, _ in kube.calls) <= 5

    scenario_of(body)


def test_one_object_cannot_flood() -> None:
    async def body(kube: FakeKube, recorder: EventRecorder) -> None:
        for number in range(1_000):
            recorder.record(POD, "Noise", f"number {number}")
        await recorder.flush(60)
        assert len(posted(kube)) <= 21
        assert recorder.dropped >= 979
        recorder.record(made("q", "uid-q", 8), "Noise", "another object is heard")
        await recorder.flush(60)
        assert any(e["note"] == "another object is heard" for e in posted(kube))

    scenario_of(body)


def test_an_api_server_that_is_away_does_not_end_the_recorder() -> None:
    async def body(kube: FakeKube, recorder: EventRecorder) -> None:
        async def refuse(_: str) -> None:
            raise UnavailableError(0, "", "away", "POST events")

        kube.fault = refuse
        recorder.record(POD, "Lost", "never posted")
        await recorder.flush(5)
        kube.fault = None
        recorder.record(POD, "Found", "posted")
        await recorder.flush(5)
        assert [e["reason"] for e in posted(kube)] == ["Found"]

    scenario_of(body)
