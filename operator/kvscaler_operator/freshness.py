"""SignalsFresh: whether load and memory are observed now, and by which path."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvscaler.protocol.state import ReplicaState
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_api.reasons import Reason

from kvscaler_operator.conditions import NAMED_PODS, Verdict
from kvscaler_operator.observe import Replica
from kvscaler_operator.signals import SignalPath, SignalStore

REASON_OF_ABSENCE: Mapping[AbsenceReason, Reason] = {
    AbsenceReason.MISSING: Reason.METRICS_MISSING,
    AbsenceReason.STALE: Reason.METRICS_STALE,
    AbsenceReason.NOT_A_NUMBER: Reason.METRICS_NOT_A_NUMBER,
    AbsenceReason.MISMATCHED: Reason.METRICS_MISMATCHED,
    AbsenceReason.PARTIAL: Reason.METRICS_PARTIAL,
}

UNUSED_SECONDS = 300.0
"""Prometheus is the other path: it is not called useless while it may not have scraped yet."""

_NO_ANSWER = Absent(AbsenceReason.MISSING, "replicas", "no answer yet")


@dataclass(frozen=True, slots=True)
class PathFault:
    """What is wrong with a way to observe replicas. `other` is said while the other one works;
    empty when there is none."""

    reason: Reason
    words: str
    other: str


def path_faults(
    signals: SignalStore,
    service_uid: str,
    server: str,
    configured: Collection[str],
    serving: Sequence[Replica],
    now: float,
) -> list[PathFault]:
    """What is wrong with a path while the other one may carry on."""
    faults: list[PathFault] = []
    direct = SignalPath.DIRECT in signals.paths
    prometheus = SignalPath.PROMETHEUS in signals.paths
    if prometheus:
        other = "replicas are asked directly" if direct else ""
        health = signals.health.get(f"{SignalPath.PROMETHEUS}/{server}")
        words = ""
        if server in configured:
            words = health.error if health is not None else ""
        elif configured or not direct:
            words = f"the operator's configuration has no Prometheus server {server!r}"
        if words:
            faults.append(PathFault(Reason.PROMETHEUS_UNREACHABLE, words, other))
        elif direct and server in configured:
            useless = _useless(signals, service_uid, serving, now)
            if useless:
                words = f"Prometheus {server} has nothing usable of any replica: {useless}"
                faults.append(PathFault(Reason.PROMETHEUS_UNUSABLE, words, other))
    if direct and prometheus and serving:
        silent = [r for r in serving if not signals.answers_directly(service_uid, r.uid, now)]
        if len(silent) == len(serving):
            words = f"no replica answers directly ({silent[0].name})"
            faults.append(PathFault(Reason.REPLICAS_UNREACHABLE, words, "Prometheus carries on"))
    return faults


def _useless(signals: SignalStore, service_uid: str, serving: Sequence[Replica], now: float) -> str:
    """Why nothing that Prometheus has of these replicas could be used if they fell silent."""
    useless = ""
    for replica in serving:
        signal = signals.scraped(service_uid, replica.uid, now, UNUSED_SECONDS)
        if isinstance(signal, Present):
            return ""
        silent = signal.reason in (AbsenceReason.MISSING, AbsenceReason.STALE)
        if silent and now - replica.since <= UNUSED_SECONDS:
            return ""
        useless = useless or f"{replica.name}: {signal}"
    return useless


def signals_fresh(
    serving: Sequence[Replica],
    states: Mapping[str, Signal[ReplicaState]],
    path_faults: Sequence[PathFault],
) -> Verdict:
    """SignalsFresh: False when replicas can't be observed; True with a reason while one of the two
    paths is down and the other carries on."""
    if not serving:
        return Verdict(None, Reason.NO_REPLICAS, "no replica is ready to be observed")
    absent = {
        replica.name: signal
        for replica in serving
        if isinstance(signal := states.get(replica.uid, _NO_ANSWER), Absent)
    }
    if absent:
        words = "; ".join(f"{name}: {signal}" for name, signal in list(absent.items())[:NAMED_PODS])
        words += "".join(f"; {fault.words}" for fault in path_faults)
        if len(absent) < len(serving):
            message = f"{len(absent)} of {len(serving)} ready replicas are not observed: {words}"
            return Verdict(False, Reason.METRICS_PARTIAL, message)
        reason = REASON_OF_ABSENCE[_gravest(absent.values())]
        only = next((fault for fault in path_faults if not fault.other), None)
        if only is not None and reason in (Reason.METRICS_MISSING, Reason.METRICS_STALE):
            # Nothing is wrong with what was said: nobody says anything.
            reason = only.reason
        return Verdict(False, reason, f"no replica is observed: {words}")
    if path_faults:
        fault = path_faults[0]
        return Verdict(
            True, fault.reason, f"{fault.words}; {fault.other or 'there is no other path'}"
        )
    return Verdict(True, Reason.FRESH, "all ready replicas are observed")


def _gravest(absences: Iterable[Absent]) -> AbsenceReason:
    order = list(AbsenceReason)
    return max((absent.reason for absent in absences), key=order.index)
