"""The replicas of a service as Kubernetes sees them."""

from dataclasses import dataclass
from enum import StrEnum

DEFAULT_START_SECONDS = 90.0
"""Time from a scale-up to a ready replica until one was seen: Pods with warm images take 65-135 s."""


class ReplicaPhase(StrEnum):
    """What a Pod is to the fleet. Only ready Pods are expected to report."""

    READY = "Ready"
    WARMING = "Warming"
    """Scheduled and starting: supply that is on its way."""
    UNSCHEDULABLE = "Unschedulable"
    """No node takes it: no supply, and no reason to ask for one more like it."""
    CRASH_LOOPING = "CrashLooping"
    DRAINING = "Draining"
    """Chosen for removal, finishing what it accepted."""
    TERMINATING = "Terminating"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica. `since` (Unix seconds) is when it entered its phase."""

    pod_uid: str
    pod_name: str
    phase: ReplicaPhase
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet. `target_replicas` is what `spec.replicas` asks for now, a drain not deducted."""

    target_replicas: int
    replicas: tuple[ReplicaView, ...]
    rollout_in_progress: bool = False
    start_seconds: float = DEFAULT_START_SECONDS
    """Learned time from a scale-up to a ready replica."""

    def count(self, *phases: ReplicaPhase) -> int:
        """Replicas in any of `phases`."""
        return sum(1 for replica in self.replicas if replica.phase in phases)

    def uids(self, *phases: ReplicaPhase) -> frozenset[str]:
        """Pod UIDs of the replicas in any of `phases`."""
        return frozenset(r.pod_uid for r in self.replicas if r.phase in phases)

    @property
    def supply(self) -> int:
        """Replicas that serve or soon will."""
        return self.count(ReplicaPhase.READY, ReplicaPhase.WARMING)

    def scaled_up_within(self, now: float, seconds: float) -> bool:
        """Whether a round of growth is under way, or came to others less than `seconds` ago.

        A first replica is no growth: nothing was queueing before it. Readiness far in the future
        is another clock's, and says nothing.
        """
        if self.count(ReplicaPhase.WARMING):
            return True
        ready = [r.since for r in self.replicas if r.phase is ReplicaPhase.READY]
        return len(ready) > 1 and abs(now - max(ready)) < seconds
