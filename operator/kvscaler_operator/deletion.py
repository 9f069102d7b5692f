"""Which replicas go first: by our choice, and by Kubernetes'.

The ReplicaSet controller has an order of its own: unassigned, pending and not-ready Pods before ready
ones, then the deletion cost. A warming Pod goes before any that serves, whatever we say: so it
is chosen before one, and a drain that is then one too many ends. Among the others the cost decides:
a Pod that is done gets a lower one than a Pod that still drains.
"""

from collections.abc import Collection, Mapping, Sequence

from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import Present, Signal
from pydantic import BaseModel, ConfigDict, ValidationError

from kvscaler_operator.observe import Replica

CHOSEN_COST = -2_000_000_000
"""Of a Pod that drains: below any cost that a template may give to all its Pods (32 bits)."""
DONE_COST = -2_100_000_000
"""Of a Pod that is done while others still drain."""

JUST_SECONDS = 5.0
"""Age of a report after which a Pod may have got new requests."""

DELETION_ORDER = (
    ReplicaPhase.UNSCHEDULABLE,
    ReplicaPhase.CRASH_LOOPING,
    ReplicaPhase.WARMING,
    ReplicaPhase.DRAINING,
    ReplicaPhase.READY,
)
"""Not-ready Pods before ready ones, as the ReplicaSet controller has it."""

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


def serves(replica: Replica, states: States, now: float) -> bool:
    """Whether a Pod may have requests.

    One that is not ready has none when it has just said so. When it says nothing, that is not zero:
    it may have some if it was ready since its engine started.
    """
    if replica.phase is ReplicaPhase.READY:
        return True
    if replica.phase is ReplicaPhase.DRAINING:
        return replica.engine_started is not False
    state = states.get(replica.uid)
    if isinstance(state, Present) and state.age_seconds(now) <= JUST_SECONDS:
        return state.value.drain.live_requests > 0
    return replica.engine_started is True


def deletion_order(
    replicas: Sequence[Replica], preferred: Sequence[str], states: States
) -> list[Replica]:
    """Replicas in the order in which to give them up.

    Those that no node has, that are pending or not ready first, as the ReplicaSet controller takes
    them first whatever we say; then those that drain already, oldest drain first; then as the
    decision prefers; then the least loaded, where an unknown load counts as the heaviest.
    """
    ranks = {uid: index for index, uid in enumerate(preferred)}
    loads = _loads(states)

    def key(replica: Replica) -> tuple[bool, bool, int, float, float, str]:
        assigned, begun, _, _ = replica.deletion_rank
        record = DrainRecord.of(replica)
        chosen = record.since if record is not None else float(ranks.get(replica.uid, len(ranks)))
        load = loads.get(replica.uid, float("inf"))
        phase = DELETION_ORDER.index(replica.phase)
        return (assigned, begun, phase, chosen, load, replica.name)

    return sorted(alive(replicas), key=key)


def next_to_go(replicas: Sequence[Replica], done: Collection[str]) -> int:
    """How many Pods the ReplicaSet controller would delete before the first that is not done.

    `done` are UIDs. What can't be foreseen counts against us: what the controller breaks by age or
    node, and when a Pod that was told to drain is seen to be not ready.
    """

    def rank(replica: Replica) -> tuple[bool, bool, bool, int, bool]:
        assigned, begun, ready, cost = replica.deletion_rank
        is_done = replica.uid in done
        return assigned, begun, ready and (is_done or cost != CHOSEN_COST), cost, is_done

    order = sorted(alive(replicas), key=rank)
    for count, replica in enumerate(order):
        if replica.uid not in done:
            return count
    return len(order)


def alive(replicas: Sequence[Replica]) -> list[Replica]:
    """Those that are not on their way out."""
    return [r for r in replicas if r.phase is not ReplicaPhase.TERMINATING]


def _loads(states: States) -> dict[str, float]:
    return {
        uid: float(max(s.value.occupancy.reserved_blocks, s.value.occupancy.referenced_blocks))
        for uid, s in states.items()
        if isinstance(s, Present) and s.value.occupancy is not None
    }
