"""What the constraints share: the arrival rate that counts, live load, backlog, and their ages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler.protocol.state import OccupancyReport
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.traffic.signal import Absent, Present, Signal
from kvscaler.traffic.window import LEVEL_SECONDS, Rate, TrafficWindow

STEP_SIGMAS = 4.0
"""Standard errors by which recent arrivals must exceed the time before to count as a step."""
MIN_RATE_SECONDS = 10.0
"""Arrivals over less than this are no rate yet."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival rate that sizing uses, requests per second, and which window it is from."""

    per_second: float
    window_seconds: float
    step: bool


def arrivals(level: Rate, *recent: Rate) -> Arrivals | None:
    """Level over 45 s, or a recent window that shows a step up; `None` before there is a rate.

    At a few requests per minute, 12 s of counts swing by half without any change, so a step has to
    exceed what the time before explains by four standard errors, and is believed only up to one
    standard error below what it shows (so is a level that is not yet watched for 45 s, in part).
    One is added under the root, so that a single request after silence is no step.
    """
    if level.seconds < MIN_RATE_SECONDS:
        return None
    doubt = math.sqrt(level.count) * (1.0 - min(1.0, level.seconds / LEVEL_SECONDS))
    steady = Arrivals((level.count - doubt) / level.seconds, level.seconds, step=False)
    steps = [step for window in recent if (step := _step(window, level)) is not None]
    return max([steady, *steps], key=lambda found: found.per_second)


def _step(recent: Rate, level: Rate) -> Arrivals | None:
    """The rate of a recent window, if it exceeds what the rest of the level explains."""
    before_seconds = level.seconds - recent.seconds
    if before_seconds < MIN_RATE_SECONDS or recent.seconds <= 0:
        return None
    expected = (level.count - recent.count) / before_seconds * recent.seconds
    if recent.count <= expected + STEP_SIGMAS * math.sqrt(expected + 1.0):
        return None
    believed = (recent.count - math.sqrt(recent.count)) / recent.seconds
    return Arrivals(believed, recent.seconds, step=True)


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

    @property
    def block_seconds(self) -> float | None:
        """E∫s dt per request, when enough requests have finished to know it."""
        if self.window is None or self.window.lengths is None:
            return None
        value = self.window.lengths.block_seconds
        return value if value > 0 else None

    @property
    def residence_seconds(self) -> float | None:
        """Time that a request holds blocks, as (E∫s dt)² / E∫s² dt: exact for a constant s."""
        if self.block_seconds is None or self.window is None or self.window.lengths is None:
            return None
        squared = self.window.lengths.block_squared_seconds
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
    now: float,
) -> Demand:
    """Demand from the two signals.

    A jump fills 12 s only after 12 s, and is sized too small before. So the last 4 s count too, but
    only for the first answer: of all windows of 4 s in a spike, the fullest says half as much again
    as is true.
    """
    live = live_load(occupancy, fleet)
    if isinstance(traffic, Absent):
        return Demand(None, None, live, f"traffic is {traffic}")
    window = traffic.value
    recent = [window.arrivals_short]
    if not fleet.scaled_up_within(now, LEVEL_SECONDS):
        recent.append(window.arrivals_burst)
    rate = arrivals(window.arrivals_level, *recent)
    why = ""
    if rate is None:
        seconds = window.arrivals_level.seconds
        why = f"traffic was watched for {seconds:.0f} s, a rate needs {MIN_RATE_SECONDS:.0f} s"
    elif window.lengths is None:
        why = "too few requests have finished to know their length"
    return Demand(rate, window, live, why)
