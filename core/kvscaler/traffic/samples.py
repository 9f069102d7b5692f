"""One reading of a replica's cumulative counters."""

from dataclasses import dataclass

from kvscaler.protocol.state import InFlight, ReplicaState, TrafficCounters


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """One reading. `time` is the reader's clock (for Prometheus: the scrape's time).

    `process_seconds` is the age of the process by the replica's own clock, so that a skewed clock
    does not move its start; `None` when that clock was set back since, and nobody knows the age.
    """

    pod_uid: str
    started_at: float
    process_seconds: float | None
    time: float
    counters: TrafficCounters
    in_flight: InFlight
    source: str

    @classmethod
    def from_state(
        cls, state: ReplicaState, received_at: float, source: str = "direct"
    ) -> "TrafficSample":
        """The reading in a replica's state."""
        age = state.observed_at - state.started_at
        return cls(
            pod_uid=state.pod_uid,
            started_at=state.started_at,
            process_seconds=age if age >= 0 else None,
            time=received_at,
            counters=state.traffic,
            in_flight=state.in_flight,
            source=source,
        )

    @property
    def process_start(self) -> float | None:
        """When the process started, by the reader's clock, if its age is known."""
        return None if self.process_seconds is None else self.time - self.process_seconds
