"""Memory: replicas whose KV blocks hold the requests that are, and will be, alive together.

Requests arrive as a Poisson stream and each holds s(t) blocks over its life, so the blocks in use
have mean λ·E∫s dt (Little's law) and variance λ·E∫s² dt (Campbell's theorem). A replica takes such
a share y = λ·E∫s dt of the stream that y + z·√(y·q) stays within its usable blocks, where
q = E∫s² dt / E∫s dt is the blocks of a typical live request: large pools fill almost entirely,
small ones need proportionally more room.

That is the long run. A queue that builds up is evidence within a second or two, long before counts
of arrivals mean anything: it asks for half as many replicas more, once per round of starts. What
the next round needs is then known from arrivals, and the old queue drains meanwhile.
"""

from kvscaler.scaling.arrivals import highest_rate
from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.decision import Candidate, Constraint, Input
from kvscaler.scaling.demand import Demand
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.scaling.operating import ROOM_SIGMAS, share_per_replica
from kvscaler.scaling.rounding import replicas_for
from kvscaler.traffic.window import LengthStatistics

POSSIBLE_SIGMAS = 2.0
"""Standard errors above the last 12 s of arrivals that a queue may still ask for."""
TOLERATED_WAIT_SECONDS = 2.0
"""A queue that the fleet admits within this is no evidence of want."""
DRAIN_SECONDS = 60.0
"""Least time over which a backlog is planned to go: Pods that arrive after it went help nobody."""


def memory(
    capacity: ReplicaCapacity, demand: Demand, fleet: FleetView, now: float
) -> Candidate | None:
    """Replicas for the arrival model and for live blocks, whichever is more; `None` if unknown."""
    model = _from_arrivals(capacity, demand, now)
    live = _from_live(capacity, demand, fleet, now, 0.0 if model is None else model.needed)
    if model is None or (live is not None and live.needed > model.needed):
        return live
    return model


def _needed(capacity: ReplicaCapacity, lengths: LengthStatistics, per_second: float) -> float:
    """Replicas for an arrival rate, in the long run."""
    each = lengths.block_seconds
    request_blocks = lengths.block_squared_seconds / each
    return (
        per_second * each / share_per_replica(capacity.usable_blocks, request_blocks, ROOM_SIGMAS)
    )


def _from_arrivals(capacity: ReplicaCapacity, demand: Demand, now: float) -> Candidate | None:
    window, rate, each = demand.window, demand.arrivals, demand.block_seconds
    if window is None or rate is None or each is None or demand.lengths is None:
        return None
    usable = capacity.usable_blocks
    age = now - window.time
    mean = rate.per_second * each
    needed = _needed(capacity, demand.lengths, rate.per_second)
    replicas = replicas_for(needed)
    measured = demand.measured_block_seconds
    known = f"{age:.0f} s old"
    if measured is not None and measured != each:
        known = f"on a full replica; {measured:.1f} measured, {known}"
    return Candidate(
        Constraint.MEMORY,
        replicas,
        needed,
        f"{rate.per_second:.2f} req/s over {rate.window_seconds:.0f} s x {each:.1f} blocks·s"
        f" ({known}) is {mean:.0f} blocks in use; with room for bursts that needs"
        f" {needed:.1f} replicas of {usable} blocks",
        (
            Input("arrivals", rate.per_second, "requests/s", age),
            Input("kvPerRequest", each, "blocks·s", age),
            Input("kvInUse", mean, "blocks", age),
            Input("usableBlocks", float(usable), "blocks"),
        ),
    )


def _from_live(
    capacity: ReplicaCapacity, demand: Demand, fleet: FleetView, now: float, modelled: float
) -> Candidate | None:
    live = demand.live
    if live is None:
        return None
    usable = capacity.usable_blocks
    ready = fleet.count(ReplicaPhase.READY)
    waiting = live.waiting_blocks if _waits_too_long(capacity, demand) else 0
    needed = (live.reserved_blocks + waiting) / usable
    bound = max(modelled, _live_bound(capacity, demand, fleet, now))
    capped = min(needed, bound)
    age = now - live.time
    words = f"{live.reserved_blocks} blocks reserved"
    if live.waiting_blocks:
        words += f" and {live.waiting_blocks} waiting"
    words += f" ({age:.0f} s old) on {ready} ready replicas of {usable}"
    if waiting < live.waiting_blocks:
        words += f"; the queue is admitted within {TOLERATED_WAIT_SECONDS:.0f} s"
    elif capped < needed:
        words += f"; the queue alone asks for at most {bound:.0f} in this round"
    return Candidate(
        Constraint.MEMORY,
        replicas_for(capped),
        capped,
        f"{words}: needs {capped:.1f} replicas",
        (
            Input("reserved", float(live.reserved_blocks), "blocks", age),
            Input("waiting", float(live.waiting_blocks), "blocks", age),
            Input("usableBlocks", float(usable), "blocks"),
        ),
    )


def _waits_too_long(capacity: ReplicaCapacity, demand: Demand) -> bool:
    """Whether the queue takes the reporting replicas longer than the tolerated wait."""
    live, work = demand.live, demand.backlog_block_seconds
    if live is None or work is None:
        return True
    return work > TOLERATED_WAIT_SECONDS * capacity.usable_blocks * live.reporting


def _live_bound(capacity: ReplicaCapacity, demand: Demand, fleet: FleetView, now: float) -> float:
    """Replicas up to which live load may ask.

    None beyond those that are there while replicas are starting or have not had time to drain the
    queue. Otherwise twice as many as are ready while requests can't be sized; and half as many
    more when they can, if the arrivals of the last 12 s, two standard errors up, could need them:
    the queue of a burst that has passed drains by itself.
    """
    ready = fleet.count(ReplicaPhase.READY)
    if fleet.scaled_up_within(now, DRAIN_SECONDS):
        return float(max(fleet.supply, 1))
    window = demand.window
    if window is None or demand.lengths is None or demand.block_seconds is None:
        return 2.0 * ready
    short = window.arrivals_short
    if short.seconds <= 0:
        return 2.0 * ready
    could_need = _needed(capacity, demand.lengths, highest_rate(short, POSSIBLE_SIGMAS))
    return max(float(ready), min(could_need, float(ready + max(1, ready // 2))))
