"""What the constraints share: the arrival rate that counts, live load, backlog, and their ages."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler.protocol.state import OccupancyReport
from kvscaler.scaling.arrivals import MIN_RATE_SECONDS, Arrivals, arrivals
from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.scaling.operating import lengths_when_full
from kvscaler.traffic.signal import Absent, Present, Signal
from kvscaler.traffic.window import LengthStatistics, TrafficWindow


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """Sums over the ready replicas that reported, as of the oldest of their reports.

    Draining and terminating replicas are left out: what they hold ends with them. Values of one
    instant are added, never maxima over a window, which are not simultaneous.
    """

    reporting: int
    expected: int
    time: float
    reserved_blocks: int
    referenced_blocks: int
    waiting_blocks: int
    waiting_requests: int
    running_requests: int

    @property
    def blocks(self) -> int:
        """Blocks promised or asked for now."""
        return self.reserved_blocks + self.waiting_blocks


def live_load(
    occupancy: Mapping[str, Signal[OccupancyReport]], fleet: FleetView
) -> LiveLoad | None:
    """Live load of the ready replicas; `None` when none of them reported."""
    ready = fleet.uids(ReplicaPhase.READY)
    known = [
        signal
        for uid, signal in sorted(occupancy.items())
        if uid in ready and isinstance(signal, Present)
    ]
    if not known:
        return None
    reports = [signal.value for signal in known]
    return LiveLoad(
        reporting=len(known),
        expected=len(ready),
        time=min(signal.time for signal in known),
        # A replica that does not project a peak reserves what it references.
        reserved_blocks=sum(max(r.reserved_blocks, r.referenced_blocks) for r in reports),
        referenced_blocks=sum(r.referenced_blocks for r in reports),
        waiting_blocks=sum(r.waiting_blocks for r in reports),
        waiting_requests=sum(r.waiting_requests for r in reports),
        running_requests=sum(r.running_requests for r in reports),
    )


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything that constraints read. Parts that are unknown are `None`, with the reason why."""

    arrivals: Arrivals | None
    window: TrafficWindow | None
    live: LiveLoad | None
    why_unknown: str
    lengths: LengthStatistics | None = None
    """Lengths with block-seconds as on a full replica, which is what fleets are sized by."""

    @property
    def block_seconds(self) -> float | None:
        """E∫s dt per request on a full replica, when enough have finished to know it."""
        if self.lengths is None or self.lengths.block_seconds <= 0:
            return None
        return self.lengths.block_seconds

    @property
    def measured_block_seconds(self) -> float | None:
        """E∫s dt per request as replicas measured it, under the load that they had."""
        if self.window is None or self.window.lengths is None:
            return None
        return self.window.lengths.block_seconds

    @property
    def residence_seconds(self) -> float | None:
        """Time that a request holds blocks, as (E∫s dt)² / E∫s² dt: exact for a constant s."""
        if self.block_seconds is None or self.lengths is None:
            return None
        squared = self.lengths.block_squared_seconds
        return self.block_seconds**2 / squared if squared > 0 else None

    @property
    def backlog_block_seconds(self) -> float | None:
        """Work that waits: the waiting requests' blocks over their residence."""
        if self.live is None:
            return None
        if self.live.waiting_requests == 0 and self.live.waiting_blocks == 0:
            return 0.0
        each, residence = self.block_seconds, self.residence_seconds
        if each is None or residence is None:
            return None
        return max(self.live.waiting_requests * each, self.live.waiting_blocks * residence)

    @property
    def complete(self) -> bool:
        """Whether every replica that should have reported did: only then may the fleet shrink."""
        covered = self.window is not None and self.window.coverage >= 1.0
        heard = self.live is not None and self.live.reporting == self.live.expected
        return covered and heard


def demand(
    traffic: Signal[TrafficWindow],
    occupancy: Mapping[str, Signal[OccupancyReport]],
    fleet: FleetView,
    capacity: Signal[ReplicaCapacity],
) -> Demand:
    """Demand from the signals."""
    live = live_load(occupancy, fleet)
    if isinstance(traffic, Absent):
        return Demand(None, None, live, f"traffic is {traffic}")
    window = traffic.value
    rate = arrivals(window.arrivals_level, window.arrivals_short, *window.arrivals_recent)
    why = ""
    if rate is None:
        seconds = window.arrivals_level.seconds
        why = f"traffic was watched for {seconds:.0f} s, a rate needs {MIN_RATE_SECONDS:.0f} s"
    elif window.lengths is None:
        why = "too few requests have finished to know their length"
    lengths = window.lengths
    if lengths is not None and isinstance(capacity, Present):
        room, hits = capacity.value, window.prefix_hit_share or 0.0
        lengths = lengths_when_full(lengths, room.mean_step_time, room.usable_blocks, hits)
    return Demand(rate, window, live, why, lengths)
