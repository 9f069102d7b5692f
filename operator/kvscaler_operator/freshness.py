"""SignalsFresh: whether load and memory are observed now, and by which path."""

from collections.abc import Collection, Mapping, Sequence

from kvscaler.protocol.state import ReplicaState
from kvscaler.traffic import AbsenceReason, Absent, Signal
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

_NO_ANSWER = Absent(AbsenceReason.MISSING, "replicas", "no answer yet")


def path_faults(
    signals: SignalStore,
    service_uid: str,
    server: str,
    configured: Collection[str],
    serving: Sequence[Replica],
) -> list[tuple[Reason, str]]:
    """What is wrong with a path while the other one may carry on."""
    faults: list[tuple[Reason, str]] = []
    direct = SignalPath.DIRECT in signals.paths
    carries = "replicas are asked directly" if direct else "there is no other path"
    if SignalPath.PROMETHEUS in signals.paths:
        health = signals.health.get(f"{SignalPath.PROMETHEUS}/{server}")
        if server not in configured:
            if configured or not direct:
                words = f"the operator's configuration has no Prometheus server {server!r}"
                faults.append((Reason.PROMETHEUS_UNREACHABLE, f"{words}; {carries}"))
        elif health is not None and health.error:
            faults.append((Reason.PROMETHEUS_UNREACHABLE, f"{health.error}; {carries}"))
    if direct and SignalPath.PROMETHEUS in signals.paths and serving:
        silent = [r for r in serving if not signals.answers_directly(service_uid, r.uid)]
        if len(silent) == len(serving):
            words = f"no replica answers directly ({silent[0].name}); Prometheus carries on"
            faults.append((Reason.REPLICAS_UNREACHABLE, words))
    return faults


def signals_fresh(
    serving: Sequence[Replica],
    states: Mapping[str, Signal[ReplicaState]],
    path_faults: Sequence[tuple[Reason, str]],
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
        if len(absent) < len(serving):
            message = f"{len(absent)} of {len(serving)} ready replicas are not observed: {words}"
            return Verdict(False, Reason.METRICS_PARTIAL, message)
        worst = next(iter(absent.values()))
        return Verdict(False, REASON_OF_ABSENCE[worst.reason], f"no replica is observed: {words}")
    if path_faults:
        reason, words = path_faults[0]
        return Verdict(True, reason, words)
    return Verdict(True, Reason.FRESH, "all ready replicas are observed")
