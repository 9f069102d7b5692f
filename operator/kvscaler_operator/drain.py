"""Which replicas go, and how, so that no stream breaks.

A scale-down is a small state machine whose state is in the cluster: an annotation on each Pod
that was chosen. So a restarted operator carries on where it was. Order: chosen and annotated
with a deletion cost → told to drain → empty or out of time → the Deployment's replicas are lowered.

Which Pods go then is the ReplicaSet controller's choice (see `deletion`). So replicas are lowered only
by as many as stand at the front of its order and are done.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvscaler.protocol.drain import DrainPhase, DrainPut, DrainReport
from kvscaler.protocol.state import ReplicaState
from kvscaler.traffic import Present, Signal
from kvscaler_api.metadata import DRAIN_ANNOTATION

from kvscaler_operator.deletion import (
    CHOSEN_COST,
    DONE_COST,
    DrainRecord,
    States,
    deletion_order,
    next_to_go,
    serves,
)
from kvscaler_operator.gateways.kube import KubeGateway, NotFoundError
from kvscaler_operator.gateways.sidecar import Endpoint, SidecarError, SidecarGateway
from kvscaler_operator.observe import COST_ANNOTATION, Fleet, Replica
from kvscaler_operator.resources import PODS, Object, name_of, namespace_of, uid_of

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0
REPEAT_PUT_SECONDS = 30.0
ADMIN_DRAIN = "admin"
"""What a sidecar says of a drain that its admin API began (see `kvscaler.protocol.drain`)."""


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
        self._ended: dict[str, float] = {}
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
        surplus = order[: max(0, len(order) - target)]
        if target >= current:
            # Replicas were lowered and Pods still exist: those are going, and stay drained.
            ended = await self._end_all_but(
                {r.uid for r in surplus}, service_uid, order, states, now
            )
            again = LOOK_AGAIN_SECONDS if ended.pending else None
            return Outcome(max(target, current), again, cancelled=ended.names)
        if fleet.rollout_in_progress:
            words = "a rollout is in progress: nothing is drained until it has ended"
            return Outcome(current, LOOK_AGAIN_SECONDS * 2, waiting=words)
        ended = await self._end_all_but({r.uid for r in surplus}, service_uid, order, states, now)
        progress = _Progress()
        for replica in surplus:
            await self._advance(service_uid, replica, states, timeout_seconds, now, progress)
        chosen = {r.uid: r for r in (*progress.waiting, *progress.done)}
        marked = [chosen.get(r.uid, r) for r in order]
        done = {r.uid for r in progress.done}
        going = next_to_go(await self._put_first(marked, done), done)
        # What the Deployment asks for and does not exist yet is given up for nothing.
        lowered = min(current, max(target, len(order) - going))
        return Outcome(
            lowered,
            LOOK_AGAIN_SECONDS if lowered > target or ended.pending else None,
            tuple(progress.started),
            tuple(progress.finished),
            tuple(progress.timed_out),
            ended.names,
            f"draining {', '.join(r.name for r in progress.waiting)}" if progress.waiting else "",
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
        if not serves(replica, states, now):
            progress.done.append(replica)
            return
        record = DrainRecord.of(replica)
        if record is None:
            record = DrainRecord(since=now, timeout_seconds=timeout_seconds)
            marked = await self._annotate(replica, record, CHOSEN_COST)
            if marked is None:
                progress.done.append(replica)
                return
            replica = marked
            progress.started.append(replica.name)
        state = states.get(replica.uid)
        report = await self._tell(service_uid, replica, record, state, now)
        if _is_empty(report, state, record):
            progress.finished.append(replica.name)
            progress.done.append(replica)
        elif self._lasts(replica, record, now) >= record.timeout_seconds:
            progress.timed_out.append(replica.name)
            progress.done.append(replica)
        else:
            progress.waiting.append(replica)

    def _lasts(self, replica: Replica, record: DrainRecord, now: float) -> float:
        """Seconds that a drain has lasted. A clock that is set back lengthens it by at most what it
        has lasted already, instead of by the step."""
        drain = (replica.uid, record.since)
        began = min(record.since, now, self._began.get(drain, now))
        self._began[drain] = began
        return now - began

    async def _put_first(self, replicas: Sequence[Replica], done: Collection[str]) -> list[Replica]:
        """Give Pods that are done the lowest cost, so that they go before those that still drain, and
        one that warms goes first even if it becomes ready before the ReplicaSet controller acts."""
        result = []
        for replica in replicas:
            if replica.uid in done and replica.deletion_cost > DONE_COST:
                record = DrainRecord.of(replica)
                result.append(await self._annotate(replica, record, DONE_COST) or replica)
            else:
                result.append(replica)
        return result

    async def _end_all_but(
        self,
        going: Collection[str],
        service_uid: str,
        replicas: Sequence[Replica],
        states: States,
        now: float,
    ) -> "_Ended":
        """End every drain but those of `going`, be it ours or one that lost its annotation."""
        names, pending = [], False
        for replica in replicas:
            if replica.uid in going or not self._drains(replica, states.get(replica.uid)):
                continue
            if await self._cancel(service_uid, replica, now):
                names.append(replica.name)
            else:
                pending = True
        return _Ended(tuple(names), pending)

    def _drains(self, replica: Replica, state: Signal[ReplicaState] | None) -> bool:
        """Whether a Pod carries our marks, or drains because it was told to and nobody recalls."""
        if _is_marked(replica):
            return True
        if not isinstance(state, Present):
            return False
        drain = state.value.drain
        # What it said before its drain was ended is no news.
        news = state.time > self._ended.get(replica.uid, 0.0) + LOOK_AGAIN_SECONDS
        return news and drain.reason == ADMIN_DRAIN and drain.phase is not DrainPhase.SERVING

    async def _tell(
        self,
        service_uid: str,
        replica: Replica,
        record: DrainRecord,
        state: Signal[ReplicaState] | None,
        now: float,
    ) -> DrainReport | None:
        endpoint = self._endpoint(service_uid, replica)
        told = self._told.get(replica.uid)
        if endpoint is None or (
            told is not None and abs(now - told) < _repeat_seconds(state, told)
        ):
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

    async def _annotate(
        self, replica: Replica, record: DrainRecord | None, cost: int
    ) -> Replica | None:
        """Mark a Pod: with the cost alone when it never served. `None` when it is gone."""
        annotations = {COST_ANNOTATION: str(cost)}
        if record is not None:
            annotations[DRAIN_ANNOTATION] = json.dumps(record.model_dump(), sort_keys=True)
        pod = await self._apply(replica.pod, annotations)
        return None if pod is None else replace(replica, pod=pod)

    async def _cancel(self, service_uid: str, replica: Replica, now: float) -> bool:
        endpoint = self._endpoint(service_uid, replica)
        if endpoint is not None:
            try:
                await self._sidecars.put_drain(endpoint, DrainPut(drain=False))
            except SidecarError as error:
                self._warn(replica, f"drain not ended yet: {error}")
                return False
        self._told.pop(replica.uid, None)
        self._ended[replica.uid] = now
        if not _is_marked(replica):
            return True
        return await self._apply(replica.pod, {}) is not None

    async def _apply(self, pod: Object, annotations: Mapping[str, str]) -> Object | None:
        """Own exactly these annotations of a Pod: none takes ours away. `None` when it is gone."""
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
            live = await self._kube.apply(PODS, document)
        except NotFoundError:
            return None
        self._observed(live)
        return live

    def _warn(self, replica: Replica, words: str) -> None:
        """Once for each Pod: a step is taken every second."""
        if replica.uid not in self._warned:
            self._warned.add(replica.uid)
            logger.warning("%s: %s", replica.name, words)

    def keep(self, pod_uids: set[str]) -> None:
        """Forget Pods that are gone."""
        self._told = {uid: at for uid, at in self._told.items() if uid in pod_uids}
        self._ended = {uid: at for uid, at in self._ended.items() if uid in pod_uids}
        self._warned &= pod_uids


@dataclass(slots=True)
class _Progress:
    """How far the chosen Pods have come; names are for events."""

    done: list[Replica] = field(default_factory=list)
    waiting: list[Replica] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ended:
    """Pods whose drain was ended. `pending`: some could not be told, and are to be tried again."""

    names: tuple[str, ...]
    pending: bool


def _repeat_seconds(state: Signal[ReplicaState] | None, told: float) -> float:
    """How long after one PUT the next may follow: soon when the Pod forgot, as a restart does."""
    forgot = (
        isinstance(state, Present)
        and state.time > told + LOOK_AGAIN_SECONDS
        and state.value.drain.phase is DrainPhase.SERVING
    )
    return LOOK_AGAIN_SECONDS if forgot else REPEAT_PUT_SECONDS


def _is_empty(
    report: DrainReport | None, state: Signal[ReplicaState] | None, record: DrainRecord
) -> bool:
    if report is not None:
        return report.phase is DrainPhase.EMPTY
    # What was said before this drain began is about another one.
    if not isinstance(state, Present) or state.time < record.since:
        return False
    return state.value.drain.phase is DrainPhase.EMPTY


def _is_marked(replica: Replica) -> bool:
    return replica.drain_record is not None or replica.deletion_cost in {CHOSEN_COST, DONE_COST}
