"""Which replicas' word on their own size is taken: one liar must not size a whole fleet.

The smallest replica's pool sets the capacity that the fleet is sized by, and the limits that every
replica is given. So a single sidecar that reports a pool 50 times too small would multiply the
fleet and shut the doors of all others, and one that reports 50 times too much would shrink it. A
budget can be off by what it estimates, never by an order of magnitude; and Pods of one template
differ by little. What is beyond either is no measurement: nothing that this replica says about
itself is used, with that reason, and it counts as not observed. The budget is the present spec's,
so it judges no Pod that still runs another one.
"""

from collections.abc import Sequence
from statistics import median_low

from kvscaler.protocol.state import ReplicaState
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_api.template import ENGINE_CONTAINER

from kvscaler_operator.assess import Assessment
from kvscaler_operator.decision import States
from kvscaler_operator.observe import Replica
from kvscaler_operator.resources import Object

BUDGET_FACTOR = 8.0
"""How far a pool may be from the predicted one, either way."""
PEER_FACTOR = 2.0
"""How far a pool may be from those of half of the other Pods of its template, either way."""
FEWEST_PEERS = 2
SIZING_FIELDS = ("image", "args", "env", "resources")


def believed(
    deployment: Object | None,
    replicas: Sequence[Replica],
    states: States,
    assessment: Assessment,
) -> dict[str, Signal[ReplicaState]]:
    """`states` (by Pod UID), with an absence in the place of each whose size can't be."""
    pools = {
        uid: signal.value.capacity.kv_blocks
        for uid, signal in states.items()
        if isinstance(signal, Present) and signal.value.capacity is not None
    }
    revisions = {replica.uid: replica.revision for replica in replicas}
    current = {replica.uid for replica in replicas if _runs(replica, deployment)}
    result = dict(states)
    for uid, blocks in pools.items():
        peers = [
            pool
            for other, pool in pools.items()
            if other != uid and revisions.get(other) == revisions.get(uid)
        ]
        words = _doubt(blocks, assessment if uid in current else None, peers)
        if words:
            signal = states[uid]
            result[uid] = Absent(AbsenceReason.MISMATCHED, signal.source, words)
    return result


def _doubt(blocks: int, assessment: Assessment | None, peers: Sequence[int]) -> str:
    budget = assessment.budget if assessment is not None else None
    if budget is not None and _apart(blocks, budget.blocks, BUDGET_FACTOR):
        return f"reports {blocks} KV blocks, where the budget predicts {budget.blocks}"
    agreeing = sum(1 for pool in peers if not _apart(blocks, pool, PEER_FACTOR))
    if len(peers) >= FEWEST_PEERS and 2 * agreeing < len(peers):
        others = median_low(peers)
        return f"reports {blocks} KV blocks, where others of its template have {others}"
    return ""


def _runs(replica: Replica, deployment: Object | None) -> bool:
    """Whether a Pod's engine is the one of the Deployment's template, as far as its size goes."""
    if deployment is None:
        return False
    wanted, found = _engine(deployment["spec"]["template"]), _engine(replica.pod)
    return all(wanted.get(field) == found.get(field) for field in SIZING_FIELDS)


def _engine(pod: Object) -> Object:
    containers = (pod.get("spec") or {}).get("containers") or ()
    return next((dict(c) for c in containers if c.get("name") == ENGINE_CONTAINER), {})


def _apart(value: float, reference: float, factor: float) -> bool:
    return value * factor < reference or value > reference * factor
