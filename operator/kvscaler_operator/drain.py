"""Which replicas go, and how, so that no stream breaks.

A scale-down is a small state machine whose state is in the cluster: an annotation on each Pod
that was chosen. So a restarted operator carries on where it was. Order: chosen and annotated
with a deletion cost → told to drain → empty or out of time → the Deployment's replicas are lowered
by as many. Which Pods the ReplicaSet controller then deletes follows its own order (unscheduled,
pending and not-ready Pods before ready ones, then the deletion cost), so the choice here follows it too.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvscaler.protocol.drain import DrainPhase, DrainPut, DrainReport
from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import Present, Signal
from kvscaler_api.metadata import DRAIN_ANNOTATION
from pydantic import BaseModel, ConfigDict, ValidationError

from kvscaler_operator.gateways.kube import KubeGateway, NotFoundError
from kvscaler_operator.gateways.sidecar import Endpoint, SidecarError, SidecarGateway
from kvscaler_operator.observe import Fleet, Replica
from kvscaler_operator.resources import PODS, Object, name_of, namespace_of, uid_of

logger = logging.getLogger(__name__)

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
CHOSEN_COST = "-1000"
LOOK_AGAIN_SECONDS = 1.0
REPEAT_PUT_SECONDS = 30.0

DELETION_ORDER = (
    ReplicaPhase.UNSCHEDULABLE,
    ReplicaPhase.CRASH_LOOPING,
    ReplicaPhase.WARMING,
    ReplicaPhase.DRAINING,
    ReplicaPhase.READY,
)
"""Unassigned and not-ready Pods before ready ones, as the ReplicaSet controller has it."""

States = Mapping[str, Signal[ReplicaState]]
"""By Pod UID."""


class DrainRecord(BaseModel):
    """What the annotation on a draining Pod says."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    since: float
    """Unix seconds."""
    timeout_seconds: float

    @classmethod
    def of(cls, replica: Replica) -> "DrainRecord | None":
        """The record on a Pod. One that can't be read counts as begun long ago."""
        text = replica.drain_record
        if text is None:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return cls(since=0.0, timeout_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step of the scale-down came to.

    `replicas` is what the Deployment should have now. `started`, `finished` and `cancelled` name
    Pods, for events; `timed_out` those that were given up on.
    """

    replicas: int
    look_again_seconds: float | None = None
    started: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    timed_out: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    waiting: str = ""


def serves(replica: Replica, states: States) -> bool:
    """Whether a Pod may have requests: it is or was ready, or says that it has some."""
    if replica.phase in (ReplicaPhase.READY, ReplicaPhase.DRAINING):
        return True
    state = states.get(replica.uid)
    return isinstance(state, Present) and state.value.drain.live_requests > 0


def deletion_order(
    replicas: Sequence[Replica], preferred: Sequence[str], states: States
) -> list[Replica]:
    """Replicas in the order in which to give them up.

    Those that are not ready first, as the ReplicaSet controller takes them first whatever we say;
    then those that drain already, oldest drain first; then as the decision prefers; then the least
    loaded, where an unknown load counts as the heaviest.
    """
    ranks = {uid: index for index, uid in enumerate(preferred)}
    loads = _loads(states)

    def key(replica: Replica) -> tuple[int, float, float, str]:
        record = DrainRecord.of(replica)
        chosen = record.since if record is not None else float(ranks.get(replica.uid, len(ranks)))
        load = loads.get(replica.uid, float("inf"))
        return (DELETION_ORDER.index(replica.phase), chosen, load, replica.name)

    alive = [r for r in replicas if r.phase is not ReplicaPhase.TERMINATING]
    return sorted(alive, key=key)


class Drainer:
    """Runs scale-downs. Its memory only spares repeated calls; a restart loses nothing."""

    def __init__(
        self,
        kube: KubeGateway,
        sidecars: SidecarGateway,
        endpoint: Callable[[str, Replica], Endpoint | None],
        observed: Callable[[Object], object],
    ) -> None:
        self._kube = kube
        self._sidecars = sidecars
        self._endpoint = endpoint
        self._observed = observed
        self._told: dict[str, float] = {}
        self._began: dict[tuple[str, float], float] = {}
        self._warned: set[str] = set()

    async def step(
        self,
        service_uid: str,
        fleet: Fleet,
        target: int,
        preferred: Sequence[str],
        states: States,
        timeout_seconds: float,
        now: float,
    ) -> Outcome:
        """Bring the fleet one step nearer to `target` replicas."""
        current = fleet.replica_count
        order = deletion_order(fleet.replicas, preferred, states)
        if target >= current:
            # Replicas were lowered and Pods still exist: those are going, and stay drained.
            going = {r.uid for r in order[: max(0, len(order) - target)]}
            cancelled = await self._cancel_all_but(going, service_uid, fleet)
            return Outcome(max(target, current), cancelled=cancelled)
        if fleet.rollout_in_progress:
            words = "a rollout is in progress: nothing is drained until it has ended"
            return Outcome(current, LOOK_AGAIN_SECONDS * 2, waiting=words)
        surplus = current - target
        chosen = order[: max(0, len(order) - target)]
        cancelled = await self._cancel_all_but({r.uid for r in chosen}, service_uid, fleet)
        progress = _Progress(
            # What the Deployment asks for and does not exist yet is given up for nothing; what
            # exists above what it asks for is being deleted already.
            done=current - len(order)
        )
        for replica in chosen:
            await self._advance(service_uid, replica, states, timeout_seconds, now, progress)
        lowered = min(surplus, max(0, progress.done))
        return Outcome(
            current - lowered,
            LOOK_AGAIN_SECONDS if lowered < surplus else None,
            tuple(progress.started),
            tuple(progress.finished),
            tuple(progress.timed_out),
            cancelled,
            f"draining {', '.join(progress.waiting)}" if progress.waiting else "",
        )

    async def _advance(
        self,
        service_uid: str,
        replica: Replica,
        states: States,
        timeout_seconds: float,
        now: float,
        progress: "_Progress",
    ) -> None:
        if not serves(replica, states):
            progress.gone()
            return
        record = DrainRecord.of(replica)
        if record is None:
            record = DrainRecord(since=now, timeout_seconds=timeout_seconds)
            if not await self._annotate(replica, record):
                progress.gone()
                return
            progress.started.append(replica.name)
        report = await self._tell(service_uid, replica, record, now)
        if _is_empty(report, states.get(replica.uid)):
            progress.finished.append(replica.name)
            progress.gone()
        elif self._lasts(replica, record, now) >= record.timeout_seconds:
            progress.timed_out.append(replica.name)
            progress.gone()
        else:
            progress.waiting.append(replica.name)

    def _lasts(self, replica: Replica, record: DrainRecord, now: float) -> float:
        """Seconds that a drain has lasted. A clock that is set back lengthens it by at most what it
        has lasted already, instead of by the step."""
        drain = (replica.uid, record.since)
        began = min(record.since, now, self._began.get(drain, now))
        self._began[drain] = began
        return now - began

    async def _cancel_all_but(
        self, going: set[str], service_uid: str, fleet: Fleet
    ) -> tuple[str, ...]:
        draining = [
            r for r in fleet.replicas if r.phase is ReplicaPhase.DRAINING and r.uid not in going
        ]
        return tuple([r.name for r in draining if await self._cancel(service_uid, r)])

    async def _tell(
        self, service_uid: str, replica: Replica, record: DrainRecord, now: float
    ) -> DrainReport | None:
        endpoint = self._endpoint(service_uid, replica)
        if endpoint is None or abs(now - self._told.get(replica.uid, 0.0)) < REPEAT_PUT_SECONDS:
            return None
        put = DrainPut(drain=True, timeout_seconds=record.timeout_seconds)
        try:
            report = await self._sidecars.put_drain(endpoint, put)
        except SidecarError as error:
            # SIGTERM alone keeps every stream; the time-out of the drain bounds the wait.
            self._warn(replica, f"drain not accepted yet: {error}")
            return None
        self._told[replica.uid] = now
        return report

    async def _annotate(self, replica: Replica, record: DrainRecord) -> bool:
        annotations = {
            DRAIN_ANNOTATION: json.dumps(record.model_dump(), sort_keys=True),
            COST_ANNOTATION: CHOSEN_COST,
        }
        return await self._apply(replica.pod, annotations)

    async def _cancel(self, service_uid: str, replica: Replica) -> bool:
        endpoint = self._endpoint(service_uid, replica)
        if endpoint is not None:
            try:
                await self._sidecars.put_drain(endpoint, DrainPut(drain=False))
            except SidecarError as error:
                self._warn(replica, f"drain not ended yet: {error}")
                return False
        self._told.pop(replica.uid, None)
        return await self._apply(replica.pod, {})

    async def _apply(self, pod: Object, annotations: Mapping[str, str]) -> bool:
        """Own exactly these annotations of a Pod: none takes ours away. False when it is gone."""
        document = {
            "apiVersion": PODS.api_version,
            "kind": PODS.kind,
            "metadata": {
                "name": name_of(pod),
                "namespace": namespace_of(pod),
                "uid": uid_of(pod),
                "annotations": dict(annotations),
            },
        }
        try:
            self._observed(await self._kube.apply(PODS, document))
        except NotFoundError:
            return False
        return True

    def _warn(self, replica: Replica, words: str) -> None:
        """Once for each Pod: a step is taken every second."""
        if replica.uid not in self._warned:
            self._warned.add(replica.uid)
            logger.warning("%s: %s", replica.name, words)

    def keep(self, pod_uids: set[str]) -> None:
        """Forget Pods that are gone."""
        self._told = {uid: at for uid, at in self._told.items() if uid in pod_uids}
        self._began = {drain: at for drain, at in self._began.items() if drain[0] in pod_uids}
        self._warned &= pod_uids


@dataclass(slots=True)
class _Progress:
    """How far a scale-down has come, in deletion order.

    Lowering replicas takes the first Pods of the order. So one that is not done yet holds back
    all behind it: `done` counts up to the first that waits.
    """

    done: int
    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def gone(self) -> None:
        """The next Pod in order can go."""
        if not self.waiting:
            self.done += 1


def _is_empty(report: DrainReport | None, state: Signal[ReplicaState] | None) -> bool:
    if report is not None:
        return report.phase is DrainPhase.EMPTY
    return isinstance(state, Present) and state.value.drain.phase is DrainPhase.EMPTY


def _loads(states: States) -> dict[str, float]:
    return {
        uid: float(max(s.value.occupancy.reserved_blocks, s.value.occupancy.referenced_blocks))
        for uid, s in states.items()
        if isinstance(s, Present) and s.value.occupancy is not None
    }
