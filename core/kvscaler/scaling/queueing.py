"""Queue: replicas that serve what arrives and also work off what waits, within a drain time.

The drain time is at least a replica's start-up time: capacity that comes after the backlog has
gone would have been asked for in vain. Waiting requests are work (blocks x time), not residents:
counted as if all of them held blocks at once, a queue of a minute asks for several times too much.

Requests refused for want of capacity are among the arrivals and so are demand here. Only while
arrivals can't be turned into blocks do they ask for one replica more by themselves.
"""

from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.decision import Candidate, Constraint, Input
from kvscaler.scaling.demand import Demand
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.scaling.memory import DRAIN_SECONDS
from kvscaler.scaling.rounding import replicas_for

SEQUENCE_FILL = 0.9
"""Share of a replica's sequence slots that is planned to be used."""


def queue(
    capacity: ReplicaCapacity, demand: Demand, fleet: FleetView, now: float
) -> Candidate | None:
    """Replicas for arrivals plus backlog, in blocks and in sequence slots; `None` if unknown."""
    window, rate, each = demand.window, demand.arrivals, demand.block_seconds
    residence, backlog = demand.residence_seconds, demand.backlog_block_seconds
    if window is None:
        return None
    if rate is None or each is None or residence is None or backlog is None or demand.live is None:
        return _from_refusals(demand, fleet, now)
    drain = max(DRAIN_SECONDS, fleet.start_seconds)
    age = now - demand.live.time
    blocks = (rate.per_second * each + backlog / drain) / capacity.usable_blocks
    requests = rate.per_second * residence + backlog / drain / each * residence
    slots = requests / (SEQUENCE_FILL * capacity.limits.max_sequences)
    needed = max(blocks, slots)
    unit = "blocks" if blocks >= slots else "sequence slots"
    return Candidate(
        Constraint.QUEUE,
        replicas_for(needed),
        needed,
        f"{demand.live.waiting_requests} waiting requests ({age:.0f} s old), {backlog:.0f} blocks·s"
        f" of work over {drain:.0f} s beside {rate.per_second:.2f} req/s"
        f" ({window.refused_short.per_second:.2f} refused/s) need {needed:.1f} replicas by {unit}",
        (
            Input("waitingRequests", float(demand.live.waiting_requests), "requests", age),
            Input("backlog", backlog, "blocks·s", age),
            Input("drainTime", drain, "s"),
            Input("refused", window.refused_short.per_second, "requests/s", now - window.time),
        ),
    )


def _from_refusals(demand: Demand, fleet: FleetView, now: float) -> Candidate | None:
    """One replica more while capacity refuses and nothing better is known, once per round."""
    window = demand.window
    if window is None or window.refused_short.count <= 0:
        return None
    ready = fleet.count(ReplicaPhase.READY)
    replicas = fleet.supply if fleet.scaled_up_within(now, DRAIN_SECONDS) else ready + 1
    return Candidate(
        Constraint.QUEUE,
        replicas,
        float(replicas),
        f"{window.refused_short.count:.0f} requests refused for want of capacity in the last"
        f" {window.refused_short.seconds:.0f} s, of unknown size: {replicas} replicas",
        (Input("refused", window.refused_short.per_second, "requests/s", now - window.time),),
    )
