"""What is remembered of a service between passes. A restart loses it, and costs only patience.

A busy service is passed over every second, and its object changes every few days: what follows from
the object alone is made once for each version of it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import DEFAULT_START_SECONDS, History, ReplicaPhase
from kvscaler.traffic import Present, Signal
from kvscaler_api.scaling import ScalingMode
from kvscaler_api.service import InferenceService, InferenceServiceSpec
from kvscaler_api.status import InferenceServiceStatus

from kvscaler_operator.assess import Assessment, Facts, Finding, assess
from kvscaler_operator.autoscalers import AutoscalerLook
from kvscaler_operator.children.documents import child_documents
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.observe import Replica, unix_seconds
from kvscaler_operator.resources import Object
from kvscaler_operator.status import StatusPacer
from kvscaler_operator.stored import facts, status_of
from kvscaler_operator.validate import read

STARTS_KEPT = 8
FOREIGN_SECONDS = 300.0
LONGEST_START_SECONDS = 1800.0
"""A Pod that became ready later than this after its creation tells nothing about starting."""


@dataclass(frozen=True, slots=True)
class Text:
    """One version of an object, read: `service` is `None` where `fault` says why."""

    obj: Object
    service: InferenceService | None
    fault: Finding | None
    status: InferenceServiceStatus
    status_wire: Object
    facts: Facts | None
    """Facts about the model that status has stored."""

    @classmethod
    def of(cls, obj: Object) -> "Text":
        """Read an object."""
        service, fault = read(obj)
        status = status_of(obj)
        return cls(obj, service, fault, status, status.to_wire(), facts(status))


@dataclass(slots=True)
class ServiceMemory:
    """Of one service, by its UID."""

    pacer: StatusPacer = field(default_factory=StatusPacer.fresh)
    history: History | None = None
    mode: ScalingMode | None = None
    """`scaling.mode` at the last pass."""
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
    autoscaler: AutoscalerLook = field(default_factory=AutoscalerLook)
    _warming: set[str] = field(default_factory=set)
    _text: Text | None = None
    _assessed: tuple[InferenceServiceSpec, Facts | None, str | None, Assessment] | None = None
    _children: tuple[Intent, list[Object]] | None = None

    def text(self, obj: Object) -> Text:
        """The object, read once for each version of it: a change is always a new dict."""
        if self._text is None or self._text.obj is not obj:
            self._text = Text.of(obj)
        return self._text

    def assess(self, spec: InferenceServiceSpec, stored: Facts | None) -> Assessment:
        """The budget of a replica, from the facts that a replica told or that status has stored."""
        use, dtype = self.facts or stored, self.compute_dtype
        known = self._assessed
        if known is None or known[0] is not spec or known[1:3] != (use, dtype):
            known = self._assessed = (spec, use, dtype, assess(spec, use, dtype))
        return known[3]

    def children(self, intent: Intent) -> list[Object]:
        """The documents of all children: the same objects as long as the intent is the same."""
        if self._children is None or self._children[0] != intent:
            self._children = (intent, child_documents(intent))
        return self._children[1]

    @property
    def start_seconds(self) -> float:
        """Learned time from a Pod's creation to its readiness; the slower half counts."""
        if not self.starts:
            return DEFAULT_START_SECONDS
        ordered = sorted(self.starts)
        return ordered[(len(ordered) * 3) // 4]

    def history_for(self, mode: ScalingMode, now: float, replicas: int) -> History:
        """The history to decide with. Who takes replicas over begins with those that are there, as
        after a start: what would have done under another owner is no reason to shrink at once."""
        taken_over = self.mode is not None and self.mode is not mode and mode is ScalingMode.MANAGED
        self.mode = mode
        if self.history is None or taken_over:
            return History.fresh(now, replicas)
        return self.history

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
                # One that was ready before lost it, or was drained: that is no start.
                if not replica.engine_started:
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
