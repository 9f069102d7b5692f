"""What is remembered of a service between passes. A restart loses it, and costs only patience."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import DEFAULT_START_SECONDS, History, ReplicaPhase
from kvscaler.traffic import Present, Signal

from kvscaler_operator.assess import Facts
from kvscaler_operator.observe import Replica, unix_seconds
from kvscaler_operator.status import StatusPacer

STARTS_KEPT = 8
FOREIGN_SECONDS = 300.0
LONGEST_START_SECONDS = 1800.0
"""A Pod that became ready later than this after its creation tells nothing about starting."""


@dataclass(slots=True)
class ServiceMemory:
    """Of one service, by its UID."""

    pacer: StatusPacer = field(default_factory=StatusPacer.fresh)
    history: History | None = None
    facts: Facts | None = None
    compute_dtype: str | None = None
    pause_shown: bool = False
    failures: int = 0
    """Passes in a row that ended with an error."""
    told: str = ""
    """The obstacle that an event told of last."""
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_KEPT))
    foreign: tuple[str, float] | None = None
    """Who else wrote replicas lately, and when that was seen."""
    _warming: set[str] = field(default_factory=set)

    @property
    def start_seconds(self) -> float:
        """Learned time from a Pod's creation to its readiness; the slower half counts."""
        if not self.starts:
            return DEFAULT_START_SECONDS
        ordered = sorted(self.starts)
        return ordered[(len(ordered) * 3) // 4]

    def foreign_writer(self, seen: str | None, now: float) -> str | None:
        """Who else writes replicas. Our next write takes the field over, and with it the trace of
        the other, so what was seen is remembered for a while."""
        if seen is not None:
            self.foreign = (seen, now)
        if self.foreign is None or abs(now - self.foreign[1]) > FOREIGN_SECONDS:
            self.foreign = None
        return None if self.foreign is None else self.foreign[0]

    def learn(self, replicas: Iterable[Replica], states: Iterable[Signal[ReplicaState]]) -> None:
        """Take in starts that were seen to end, and what replicas say about model and dtype."""
        replicas = tuple(replicas)
        self._warming &= {replica.uid for replica in replicas}
        for replica in replicas:
            if replica.phase is ReplicaPhase.WARMING:
                self._warming.add(replica.uid)
            elif replica.uid in self._warming:
                self._warming.discard(replica.uid)
                created = unix_seconds(replica.pod["metadata"].get("creationTimestamp"))
                seconds = replica.since - created
                if replica.phase is ReplicaPhase.READY and 0 < seconds < LONGEST_START_SECONDS:
                    self.starts.append(seconds)
        for state in states:
            if isinstance(state, Present):
                self.facts = state.value.model.facts or self.facts
                self.compute_dtype = state.value.executor.compute_dtype or self.compute_dtype
