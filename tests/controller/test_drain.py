"""The order in which replicas go, and how a scale-down takes only what is empty."""

import json
import time
from typing import Any

import pytest
from kvscaler.protocol.drain import DrainPhase, DrainPut, DrainReport
from kvscaler.protocol.state import OccupancyReport, ReplicaState
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_operator.deletion import CHOSEN_COST, DONE_COST, deletion_order
from kvscaler_operator.drain import Drainer, Outcome
from kvscaler_operator.gateways.kube import NotFoundError
from kvscaler_operator.gateways.sidecar import Endpoint, Fault, SidecarError
from kvscaler_operator.observe import COST_ANNOTATION, Fleet, Replica

from tests.controller.sidecars import make_state

DRAIN = "kvscaler.io/drain"
NOW = 1_000_000.0


class FakeKube:
    """Applies annotations to Pods."""

    def __init__(self, scene: "Scene") -> None:
        self.scene = scene
        self.applied: list[tuple[str, dict[str, str]]] = []
        self.gone: set[str] = set()

    async def apply(self, _: Any, document: dict[str, Any]) -> dict[str, Any]:
        metadata = document["metadata"]
        if metadata["name"] in self.gone:
            raise NotFoundError(404, "NotFound", "gone", metadata["name"])
        self.applied.append((metadata["name"], metadata["annotations"]))
        self.scene.annotations[metadata["name"]] = dict(metadata["annotations"])
        return self.scene.pod(metadata["name"])

    def costs(self) -> dict[str, int]:
        """The deletion cost that each Pod was given last."""
        return {name: int(marks[COST_ANNOTATION]) for name, marks in self.applied if marks}


class FakeSidecars:
    """Notes drains; answers with a phase per Pod, or not at all."""

    def __init__(self) -> None:
        self.puts: list[tuple[str, bool]] = []
        self.phases: dict[str, DrainPhase] = {}
        self.dead: set[str] = set()

    async def put_drain(self, endpoint: Endpoint, put: DrainPut) -> DrainReport:
        if endpoint.pod_name in self.dead:
            raise SidecarError(Fault.UNREACHABLE, "dead")
        self.puts.append((endpoint.pod_name, put.drain))
        phase = self.phases.get(endpoint.pod_name, DrainPhase.LINGERING)
        return DrainReport(phase=phase if put.drain else DrainPhase.SERVING)


class Scene:
    """A fleet of Pods a, b, c … and a drainer over fakes."""

    def __init__(self, replicas: int | None = None, **phases: ReplicaPhase) -> None:
        self.kube, self.sidecars = FakeKube(self), FakeSidecars()
        self.drainer = Drainer(
            self.kube,  # type: ignore[arg-type]
            self.sidecars,  # type: ignore[arg-type]
            lambda uid, r: Endpoint(uid, r.uid, r.name, "127.0.0.1", 1, 2),
            lambda _: None,
        )
        self.phases = phases
        self.since: dict[str, float] = {}
        self.annotations: dict[str, dict[str, str]] = {}
        self.loads: dict[str, int] = {}
        self.revisions: dict[str, str] = {}
        self.live: dict[str, int] = {}
        self.started: dict[str, bool] = {}
        self.pending: set[str] = set()
        self.ready_still: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.replicas = len(phases) if replicas is None else replicas
        self.updated = len(phases)

    def fleet(self) -> Fleet:
        pods = tuple(self._replica(name, phase) for name, phase in self.phases.items())
        status = {"observedGeneration": 1, "replicas": len(pods), "updatedReplicas": self.updated}
        deployment = {"metadata": {"generation": 1}, "spec": {}, "status": status}
        return Fleet(deployment, self.replicas, pods)

    def _replica(self, name: str, phase: ReplicaPhase) -> Replica:
        return Replica(self.pod(name), phase, NOW, self.revisions.get(name, "r1"))

    def pod(self, name: str) -> dict[str, Any]:
        """A Pod as the API server has it."""
        phase = self.phases[name]
        ready = phase is ReplicaPhase.READY or name in self.ready_still
        status: dict[str, Any] = {
            "phase": "Pending" if name in self.pending else "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        if name in self.started:
            status["containerStatuses"] = [{"name": "engine", "started": self.started[name]}]
        node = {} if phase is ReplicaPhase.UNSCHEDULABLE else {"nodeName": "node"}
        metadata = {"name": name, "uid": f"uid-{name}", "namespace": "ns"}
        marks = dict(self.annotations.get(name, {}))
        if phase is ReplicaPhase.DRAINING and name not in self.annotations:
            record = {"since": self.since.get(name, NOW), "timeout_seconds": 60.0}
            marks = {DRAIN: json.dumps(record), COST_ANNOTATION: str(CHOSEN_COST)}
        return {"metadata": {**metadata, "annotations": marks}, "spec": node, "status": status}

    def states(self) -> dict[str, Signal[ReplicaState]]:
        result: dict[str, Signal[ReplicaState]] = {}
        for name in self.phases:
            if name not in self.loads:
                result[f"uid-{name}"] = Absent(AbsenceReason.MISSING, "direct")
                continue
            blocks = self.loads[name]
            occupancy = OccupancyReport(
                capacity_blocks=200,
                referenced_blocks=blocks,
                reserved_blocks=blocks,
                cached_blocks=0,
                free_blocks=200 - blocks,
                running_requests=0,
                waiting_requests=0,
                waiting_tokens=0,
            )
            drain = DrainReport(
                phase=self.sidecars.phases.get(name, DrainPhase.SERVING),
                live_requests=self.live.get(name, 0),
                reason=self.reasons.get(name, ""),
            )
            state = make_state("s", f"uid-{name}", name, occupancy=occupancy, drain=drain)
            result[f"uid-{name}"] = Present(state, "direct", time.time())
        return result

    async def step(self, target: int, now: float = NOW, preferred: tuple[str, ...] = ()) -> Outcome:
        return await self.drainer.step(
            "s", self.fleet(), target, preferred, self.states(), 60.0, now
        )


READY, DRAINING = ReplicaPhase.READY, ReplicaPhase.DRAINING
WARMING, UNSCHEDULABLE = ReplicaPhase.WARMING, ReplicaPhase.UNSCHEDULABLE


def order(scene: Scene, *preferred: str) -> list[str]:
    replicas = scene.fleet().replicas
    return [r.name for r in deletion_order(replicas, preferred, scene.states())]


def test_the_least_loaded_goes_first_and_the_unknown_last() -> None:
    scene = Scene(a=READY, b=READY, c=READY)
    scene.loads = {"a": 90, "b": 10}
    assert order(scene) == ["b", "a", "c"]


def test_the_decisions_preference_counts_before_load() -> None:
    scene = Scene(a=READY, b=READY, c=READY)
    scene.loads = {"a": 90, "b": 10, "c": 50}
    assert order(scene, "uid-c", "uid-a") == ["c", "a", "b"]


def test_what_kubernetes_deletes_first_goes_first() -> None:
    scene = Scene(a=READY, b=WARMING, c=DRAINING, d=UNSCHEDULABLE, e=ReplicaPhase.TERMINATING)
    assert order(scene) == ["d", "b", "c", "a"]


async def test_a_ready_replica_is_annotated_told_and_awaited() -> None:
    scene = Scene(a=READY, b=READY, c=READY)
    scene.loads = {"a": 90, "b": 10, "c": 50}
    outcome = await scene.step(2)
    assert (outcome.replicas, outcome.started) == (3, ("b",))
    ((name, annotations),) = scene.kube.applied
    assert name == "b"
    assert annotations[COST_ANNOTATION] == str(CHOSEN_COST)
    assert json.loads(annotations[DRAIN]) == {"since": NOW, "timeout_seconds": 60.0}
    assert scene.sidecars.puts == [("b", True)]
    assert outcome.look_again_seconds is not None


async def test_replicas_are_lowered_by_what_is_empty() -> None:
    scene = Scene(a=READY, b=DRAINING, c=DRAINING)
    scene.loads = {"a": 90, "b": 0, "c": 5}
    scene.sidecars.phases = {"b": DrainPhase.EMPTY, "c": DrainPhase.DRAINING}
    outcome = await scene.step(1)
    assert outcome.replicas == 2
    assert (outcome.finished, outcome.timed_out) == (("b",), ())


async def test_what_is_empty_goes_before_what_still_drains() -> None:
    scene = Scene(a=READY, b=DRAINING, c=DRAINING)
    scene.since = {"b": NOW - 20, "c": NOW - 10}
    scene.loads = {"a": 90, "b": 5, "c": 0}
    scene.sidecars.phases = {"b": DrainPhase.DRAINING, "c": DrainPhase.EMPTY}
    # At the same cost the ReplicaSet controller might take b, which has requests.
    assert (await scene.step(1)).replicas == 2
    assert scene.kube.costs() == {"c": DONE_COST}
    assert DRAIN in scene.annotations["c"]


async def test_what_is_empty_waits_while_kubernetes_would_take_another() -> None:
    scene = Scene(a=READY, b=DRAINING, c=DRAINING)
    scene.ready_still = {"c"}  # its probe has not failed yet: not-ready Pods go before it
    scene.loads = {"a": 90, "b": 5, "c": 0}
    scene.sidecars.phases = {"b": DrainPhase.DRAINING, "c": DrainPhase.EMPTY}
    assert (await scene.step(1)).replicas == 3
    scene.ready_still = set()
    assert (await scene.step(1)).replicas == 2


async def test_one_that_drains_never_goes_in_place_of_one_that_warms() -> None:
    scene = Scene(a=READY, b=READY, d=WARMING)
    scene.loads = {"a": 90, "b": 5}
    outcome = await scene.step(1)
    # Both go. b was just told to drain and is soon not ready, at a lower cost than 0.
    assert (outcome.replicas, outcome.started) == (2, ("b",))
    assert scene.kube.costs() == {"b": CHOSEN_COST, "d": DONE_COST}
    assert DRAIN not in scene.annotations["d"]


async def test_a_pod_that_warms_goes_in_place_of_one_that_drains_and_serves_again() -> None:
    # b drains, and a Pod was deleted by hand: d is made in its place. Kubernetes would delete d,
    # as it is pending, and leave b drained.
    scene = Scene(a=READY, b=DRAINING, d=WARMING)
    scene.pending = {"d"}
    scene.loads = {"a": 90, "b": 5}
    outcome = await scene.step(2)
    assert (outcome.replicas, outcome.cancelled) == (2, ("b",))
    assert scene.sidecars.puts == [("b", False)]
    # d may become ready before Kubernetes acts: the mark has it go all the same.
    assert scene.annotations == {"b": {}, "d": {COST_ANNOTATION: str(DONE_COST)}}


async def test_a_mark_on_a_pod_that_warms_is_taken_back_with_the_scale_down() -> None:
    scene = Scene(a=READY, b=DRAINING, d=WARMING)
    scene.annotations["d"] = {COST_ANNOTATION: str(DONE_COST)}
    outcome = await scene.step(3)
    assert set(outcome.cancelled) == {"b", "d"}
    assert scene.annotations == {"b": {}, "d": {}}


async def test_a_pending_pod_goes_before_one_that_crashes() -> None:
    scene = Scene(a=READY, b=ReplicaPhase.CRASH_LOOPING, c=WARMING)
    scene.pending = {"c"}
    assert order(scene) == ["c", "b", "a"]


async def test_a_drain_ends_at_its_timeout_even_if_the_sidecar_is_dead() -> None:
    scene = Scene(a=READY, b=DRAINING)
    scene.sidecars.dead = {"b"}
    scene.since = {"b": NOW - 59}
    assert (await scene.step(1)).replicas == 2
    scene.since = {"b": NOW - 60}
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.timed_out) == (1, ("b",))


async def test_a_clock_that_is_set_back_lengthens_a_drain_by_no_more_than_it_has_lasted() -> None:
    scene = Scene(a=READY, b=DRAINING)
    scene.sidecars.phases = {"b": DrainPhase.DRAINING}
    scene.since = {"b": NOW}
    hour_ago = NOW + 40 - 3600
    assert (await scene.step(1, NOW + 40)).replicas == 2
    for now in (hour_ago, hour_ago + 59):
        assert (await scene.step(1, now)).replicas == 2
    # The drain is told again, as if nothing had been said before the clock moved.
    assert scene.sidecars.puts == [("b", True)] * 3
    outcome = await scene.step(1, hour_ago + 60)
    assert (outcome.replicas, outcome.timed_out) == (1, ("b",))


async def test_what_never_served_goes_at_once() -> None:
    scene = Scene(a=READY, b=WARMING, c=UNSCHEDULABLE)
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.started) == (1, ())
    assert scene.sidecars.puts == []


async def test_a_pod_that_lost_readiness_with_requests_is_drained() -> None:
    scene = Scene(a=READY, b=WARMING)
    scene.loads, scene.live = {"a": 5, "b": 9}, {"b": 2}
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.started) == (2, ("b",))


async def test_a_report_of_no_requests_speaks_only_for_its_moment() -> None:
    now = time.time()
    for age, drained in ((1.0, ()), (15.0, ("b",))):
        scene = Scene(a=READY, b=WARMING)
        scene.loads, scene.started = {"a": 5, "b": 0}, {"b": True}
        assert (await scene.step(1, now + age)).started == drained


async def test_a_pod_that_lost_readiness_and_says_nothing_is_drained() -> None:
    scene = Scene(a=READY, b=WARMING, c=WARMING)
    scene.loads = {"a": 5}
    scene.started = {"b": True, "c": False}
    scene.sidecars.dead = {"b"}
    outcome = await scene.step(1)
    # c never served; b was ready before, so that no answer is not "no requests".
    assert (outcome.replicas, outcome.started, outcome.waiting) == (2, ("b",), "draining b")
    assert DRAIN in scene.annotations["b"]
    scene.phases["b"] = DRAINING
    del scene.phases["c"]
    scene.replicas = 2
    assert (await scene.step(1, NOW + 59)).replicas == 2
    assert (await scene.step(1, NOW + 60)).timed_out == ("b",)


async def test_a_draining_pod_whose_engine_ended_is_not_waited_for() -> None:
    scene = Scene(a=READY, b=DRAINING)
    scene.started = {"b": False}
    assert (await scene.step(1)).replicas == 1


async def test_a_replica_that_forgot_its_drain_is_told_again() -> None:
    scene = Scene(a=READY, b=DRAINING)
    scene.loads = {"a": 5, "b": 5}
    now = time.time()
    scene.since = {"b": now - 20}
    await scene.step(1, now - 10)
    scene.sidecars.phases = {"b": DrainPhase.DRAINING}
    await scene.step(1, now - 5)
    assert scene.sidecars.puts == [("b", True)]
    scene.sidecars.phases = {"b": DrainPhase.SERVING}  # as after a restart of its container
    await scene.step(1, now)
    assert scene.sidecars.puts == [("b", True)] * 2


async def test_a_drain_that_nobody_recalls_is_ended() -> None:
    # Somebody took the annotation away, or an operator was killed at the wrong moment.
    scene = Scene(a=READY, b=WARMING)
    scene.loads = {"a": 5, "b": 5}
    scene.sidecars.phases = {"b": DrainPhase.DRAINING}
    scene.reasons = {"b": "sigterm"}
    assert (await scene.step(2)).cancelled == ()
    scene.reasons = {"b": "admin"}
    assert (await scene.step(2)).cancelled == ("b",)
    assert (scene.sidecars.puts, scene.kube.applied) == ([("b", False)], [])


async def test_what_a_replica_said_before_its_drain_began_does_not_count() -> None:
    scene = Scene(a=READY, b=READY)
    scene.loads = {"a": 90, "b": 0}
    later = time.time() + 60.0
    await scene.step(1, later)
    scene.phases["b"] = DRAINING
    scene.sidecars.phases = {"b": DrainPhase.EMPTY}  # of a drain that was ended a moment ago
    assert (await scene.step(1, later)).replicas == 2


async def test_pods_that_do_not_exist_yet_are_given_up() -> None:
    scene = Scene(replicas=4, a=READY, b=READY)
    outcome = await scene.step(2)
    assert (outcome.replicas, outcome.started) == (2, ())


async def test_demand_that_is_back_ends_the_drain() -> None:
    scene = Scene(a=READY, b=DRAINING)
    outcome = await scene.step(2)
    assert (outcome.replicas, outcome.cancelled) == (2, ("b",))
    assert scene.sidecars.puts == [("b", False)]
    assert scene.kube.applied == [("b", {})]


async def test_growth_is_immediate_and_ends_drains() -> None:
    scene = Scene(a=READY, b=DRAINING)
    outcome = await scene.step(5)
    assert (outcome.replicas, outcome.cancelled) == (5, ("b",))


async def test_a_pod_that_is_about_to_be_deleted_stays_drained() -> None:
    # Replicas were lowered to 1 already, and Kubernetes has not deleted b yet.
    scene = Scene(replicas=1, a=READY, b=DRAINING)
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.cancelled) == (1, ())
    assert scene.sidecars.puts == []


async def test_a_drain_in_flight_is_not_counted_twice() -> None:
    # 3 -> 2 was written, b is going; now 1 is wanted: only one more may be lowered, when c is empty.
    scene = Scene(replicas=2, a=READY, b=DRAINING, c=READY)
    scene.since = {"b": NOW - 30}
    scene.loads = {"a": 90, "b": 0, "c": 3}
    scene.sidecars.phases = {"b": DrainPhase.EMPTY}
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.started) == (2, ("c",))


async def test_nothing_is_drained_during_a_rollout() -> None:
    scene = Scene(a=READY, b=READY)
    scene.updated = 1
    outcome = await scene.step(1)
    assert (outcome.replicas, outcome.started) == (2, ())
    assert "rollout" in outcome.waiting


async def test_a_restarted_operator_carries_on_from_the_annotations() -> None:
    scene = Scene(a=READY, b=DRAINING, c=READY)
    scene.since = {"b": NOW - 30}
    scene.loads = {"a": 0, "b": 50, "c": 0}
    outcome = await scene.step(2)
    # b has more load than the others, and is still the one: it was chosen before.
    assert (outcome.started, outcome.waiting) == ((), "draining b")
    assert scene.sidecars.puts == [("b", True)]


async def test_a_dead_sidecar_keeps_its_annotation_until_it_can_be_told() -> None:
    scene = Scene(a=READY, b=DRAINING)
    scene.sidecars.dead = {"b"}
    outcome = await scene.step(2)
    assert (outcome.cancelled, scene.kube.applied) == ((), [])
    assert outcome.look_again_seconds is not None


async def test_a_record_that_cannot_be_read_counts_as_out_of_time() -> None:
    scene = Scene(a=READY, b=DRAINING)
    fleet = scene.fleet()
    fleet.replicas[1].pod["metadata"]["annotations"][DRAIN] = "not JSON"
    outcome = await scene.drainer.step("s", fleet, 1, (), scene.states(), 60.0, NOW)
    assert outcome.replicas == 1


@pytest.mark.parametrize("target", [0, 1, 2, 3])
async def test_never_below_the_target(target: int) -> None:
    scene = Scene(a=READY, b=READY, c=READY)
    scene.sidecars.phases = dict.fromkeys("abc", DrainPhase.EMPTY)
    assert (await scene.step(target)).replicas >= target
