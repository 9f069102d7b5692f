"""Successive counter readings of every replica, kept for the length of a traffic window.

Counters are cumulative per process: `started_at` tells a restart apart, and what a process counted
before it was first seen belongs to the window only if it began within it. Replicas appear and
vanish; what a vanished one counted stays in the buckets of its time and nowhere else.
"""

from dataclasses import dataclass

from kvscaler.protocol.state import InFlight, ReplicaState, TrafficCounters


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """One reading. `time` is the reader's clock (for Prometheus: the scrape's time)."""

    pod_uid: str
    started_at: float
    time: float
    counters: TrafficCounters
    in_flight: InFlight
    source: str

    @classmethod
    def from_state(
        cls, state: ReplicaState, received_at: float, source: str = "direct"
    ) -> "TrafficSample":
        """The reading in a replica's state."""
        return cls(
            state.pod_uid, state.started_at, received_at, state.traffic, state.in_flight, source
        )
