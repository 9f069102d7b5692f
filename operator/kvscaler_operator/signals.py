"""What is known of every replica's load, from either of two paths, and the history of it.

Direct answers and scrapes are the same facts with other ages. Each path may be down while the other
carries on; a reader gets the newest value that is fresh enough, or the reason for its absence.
A replica that answers directly speaks for itself: what Prometheus says counts once it has been
silent for a while, so that no label, relabelling or clock there can steer a fleet that answers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvscaler.protocol.state import ReplicaState
from kvscaler.traffic import (
    AbsenceReason,
    Absent,
    Present,
    Signal,
    TrafficSample,
    TrafficWindow,
    expire,
    freshest,
)
from kvscaler.traffic.history import MAX_AGE_SECONDS, SampleHistory
from kvscaler.traffic.signal import last_seen

from kvscaler_operator.gateways.sidecar import Fault


class SignalPath(StrEnum):
    """Where a replica's state is read."""

    DIRECT = "direct"
    PROMETHEUS = "prometheus"


REASON_OF_FAULT: Mapping[Fault, AbsenceReason] = {
    Fault.NOT_A_NUMBER: AbsenceReason.NOT_A_NUMBER,
    Fault.MISMATCHED: AbsenceReason.MISMATCHED,
    Fault.MALFORMED: AbsenceReason.MISMATCHED,
    Fault.TOO_LARGE: AbsenceReason.MISMATCHED,
    Fault.PARTIAL: AbsenceReason.PARTIAL,
}
"""All other faults are missing answers."""


_TOLD = tuple(name for name in ReplicaState.model_fields if name != "observed_at")


@dataclass(slots=True)
class PathHealth:
    """How the last pass over a path went."""

    last_success: float | None = None
    error: str = ""


Heard = dict[SignalPath, Signal[ReplicaState]]


@dataclass(slots=True)
class _Service:
    history: SampleHistory = field(default_factory=SampleHistory)
    states: dict[str, Heard] = field(default_factory=dict)
    silences: dict[tuple[str, SignalPath], str] = field(default_factory=dict)
    """Why nothing has followed a value, in words, by Pod UID and path."""


class SignalStore:
    """States and sample histories of all services, by service UID and Pod UID."""

    def __init__(
        self, paths: Collection[SignalPath], max_age_seconds: float = MAX_AGE_SECONDS
    ) -> None:
        self.paths = tuple(path for path in SignalPath if path in paths)
        self.max_age_seconds = max_age_seconds
        self.health: dict[str, PathHealth] = {}
        """By path, and by `prometheus/<server>`."""
        self._services: dict[str, _Service] = {}

    def observe(
        self,
        service_uid: str,
        pod_uid: str,
        path: SignalPath,
        signal: Signal[ReplicaState],
        now: float | None = None,
    ) -> bool:
        """Take one answer; returns whether it says anything new about load.

        `now` (Unix seconds) is our clock; without it, the time of the signal. An absence does not
        erase the last value of its path: that one ages until it is stale.
        """
        service = self._services.setdefault(service_uid, _Service())
        known = service.states.setdefault(pod_uid, {})
        before = known.get(path)
        if now is not None and isinstance(signal, Present):
            signal = self._not_ahead(signal, now)
        if isinstance(signal, Absent):
            if before is None or isinstance(before, Absent):
                known[path] = signal
            elif signal.reason is not AbsenceReason.MISSING:
                # It answered, and with nonsense: what it said before is no longer trusted.
                known[path] = signal
            else:
                service.silences[pod_uid, path] = signal.detail
            return isinstance(known[path], Absent) and not isinstance(before, Absent)
        if isinstance(before, Present) and before.time >= signal.time:
            ahead = before.time - (signal.time if now is None else now)
            if ahead <= self.max_age_seconds:
                return False
            # Our clock was set back. What came before seems to be from the future, would refuse
            # all news and never grow stale: start over.
            service = self._services[service_uid] = _Service()
            known, before = service.states.setdefault(pod_uid, {}), None
        service.silences.pop((pod_uid, path), None)
        if not self._speaks(path, signal, known):
            known[path] = signal
            return isinstance(before, Absent)
        taken = service.history.observe(
            TrafficSample.from_state(signal.value, signal.time, signal.source)
        )
        if isinstance(taken, Absent) and taken.reason is AbsenceReason.MISMATCHED:
            known[path] = taken
            return not isinstance(before, Absent)
        known[path] = signal
        return not isinstance(before, Present) or _changed(before.value, signal.value)

    def _not_ahead(self, signal: Present[ReplicaState], now: float) -> Signal[ReplicaState]:
        """A value from the future would be the newest until then, whatever came meanwhile."""
        if signal.time - now <= self.max_age_seconds / 4:
            return signal
        return Absent(AbsenceReason.STALE, signal.source, last_seen(signal.time, now))

    def _speaks(self, path: SignalPath, signal: Present[ReplicaState], known: Heard) -> bool:
        """Whether a value counts: a scraped one does not while the replica itself answers."""
        direct = known.get(SignalPath.DIRECT)
        if path is SignalPath.DIRECT or not isinstance(direct, Present):
            return True
        return signal.time - direct.time > self.max_age_seconds / 4

    def state(self, service_uid: str, pod_uid: str, now: float) -> Signal[ReplicaState]:
        """The newest state of a replica that is fresh enough, or why there is none."""
        service = self._services.get(service_uid)
        known = service.states.get(pod_uid) if service is not None else None
        if service is None or not known:
            return Absent(AbsenceReason.MISSING, "+".join(self.paths), "no answer yet")
        speaking = {
            path: signal
            for path, signal in known.items()
            if isinstance(signal, Absent) or self._speaks(path, signal, known)
        }
        newest = freshest(*speaking.values())
        signal = expire(newest, now, self.max_age_seconds)
        if isinstance(newest, Present) and isinstance(signal, Absent):
            path = next(path for path, found in speaking.items() if found is newest)
            silence = service.silences.get((pod_uid, path))
            if silence:
                return replace(signal, detail=f"{signal.detail}; since then {silence}")
        return signal

    def answers_directly(self, service_uid: str, pod_uid: str, now: float) -> bool:
        """Whether the direct path gave a value for a Pod that is fresh and not refuted since."""
        service = self._services.get(service_uid)
        known = service.states.get(pod_uid, {}) if service is not None else {}
        direct = known.get(SignalPath.DIRECT)
        return direct is not None and isinstance(expire(direct, now, self.max_age_seconds), Present)

    def scraped(
        self, service_uid: str, pod_uid: str, now: float, max_age_seconds: float
    ) -> Signal[ReplicaState]:
        """What Prometheus alone has of a replica, at most `max_age_seconds` old."""
        service = self._services.get(service_uid)
        known = service.states.get(pod_uid, {}) if service is not None else {}
        found = known.get(SignalPath.PROMETHEUS)
        if found is None:
            return Absent(AbsenceReason.MISSING, SignalPath.PROMETHEUS, "not read yet")
        return expire(found, now, max_age_seconds)

    def window(
        self, service_uid: str, expected: Collection[str], now: float
    ) -> Signal[TrafficWindow]:
        """Traffic of a service; `expected` are the UIDs of the Pods that should report."""
        service = self._services.setdefault(service_uid, _Service())
        return service.history.window(now, expected, self.max_age_seconds)

    def passed(self, path: str, now: float, error: str = "") -> None:
        """Note how a pass over a path went."""
        health = self.health.setdefault(path, PathHealth())
        health.error = error
        if not error:
            health.last_success = now

    def keep(self, service_uid: str, pod_uids: Collection[str]) -> None:
        """Forget the states of Pods that are gone; their samples leave with the window."""
        service = self._services.get(service_uid)
        if service is not None:
            for gone in set(service.states) - set(pod_uids):
                del service.states[gone]
            service.silences = {k: v for k, v in service.silences.items() if k[0] in pod_uids}

    def forget(self, service_uid: str) -> None:
        """Forget a service."""
        self._services.pop(service_uid, None)

    def keep_services(self, service_uids: Collection[str]) -> None:
        """Forget services that are gone: an answer under way may come after `forget`."""
        for gone in set(self._services) - set(service_uids):
            del self._services[gone]


def _changed(before: ReplicaState, after: ReplicaState) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in _TOLD)
