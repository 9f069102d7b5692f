"""A replica's state put together again from its series in Prometheus.

The names come from the same table that the replica exports by, so a replica seen through
Prometheus and one asked directly give the same facts. What lacks a series that the state needs is
partial, what holds NaN is not a number: neither is filled with zeros.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from kvscaler.protocol.metrics import READY, STATE_METRICS, MetricKind, counts_from_buckets
from kvscaler.protocol.state import ReplicaState, unreported
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from pydantic import ValidationError

from kvscaler_operator.gateways.prometheus import (
    BUCKETS,
    DOWN,
    FIRST_START,
    SCRAPE_TIME,
    Series,
)
from kvscaler_operator.gateways.sidecar import LARGEST_NUMBER

SOURCE = "prometheus"
NOT_SCRAPED = f"no {READY} with the target labels namespace and pod of this Pod"
TWO_PROCESSES = (
    "series of two processes: it was restarted between two scrapes, or another target claims its "
    "labels namespace and pod (honor_labels)"
)
PodKey = tuple[str, str]
"""Namespace and name of a Pod, from target labels."""


def by_pod(series: Iterable[Series]) -> dict[PodKey, list[Series]]:
    """The series of each Pod; those without both target labels belong to nobody."""
    result: dict[PodKey, list[Series]] = defaultdict(list)
    for one in series:
        namespace, pod = one.labels.get("namespace"), one.labels.get("pod")
        if namespace and pod:
            result[namespace, pod].append(one)
    return dict(result)


def replica_state(
    series: Iterable[Series], *, service_uid: str, service_name: str, pod_uid: str, pod_name: str
) -> Signal[ReplicaState]:
    """The state of one Pod of ours; its identity comes from Kubernetes, not from labels."""
    values: dict[str, Any] = {}
    buckets: dict[str, dict[str, float]] = defaultdict(dict)
    sums: dict[str, float] = {}
    stamps: set[float] = set()
    first_start: float | None = None
    down = False
    for one in series:
        number = _number(one.value)
        if number is None:
            detail = f"{one.labels.get('__name__', one.query)} is {one.value}"
            return Absent(AbsenceReason.NOT_A_NUMBER, SOURCE, detail)
        if one.query == SCRAPE_TIME:
            stamps.add(number)
        elif one.query == DOWN:
            down = True
        elif one.query == FIRST_START:
            first_start = number
        else:
            _take(one, number, values, buckets, sums)
    if not stamps:
        words = "its scrape fails (up is 0)" if down else NOT_SCRAPED
        return Absent(AbsenceReason.MISSING, SOURCE, words)
    scraped_at = min(stamps)
    if len(stamps) > 1:
        # The next pass reads it whole; until then what was known stays.
        return Absent(AbsenceReason.MISSING, SOURCE, "scraped while it was read", scraped_at)
    try:
        _put_histograms(values, buckets, sums)
        values.update(
            service_uid=service_uid,
            service_name=service_name,
            pod_uid=pod_uid,
            pod_name=pod_name,
        )
        state = ReplicaState.model_validate(_without_incomplete(values))
        if first_start is not None and first_start != state.started_at:
            return Absent(AbsenceReason.MISMATCHED, SOURCE, TWO_PROCESSES, scraped_at)
        missing = unreported(state)
        if missing:
            words = f"no series of {', '.join(_NAMES.get(path, path) for path in missing[:3])}"
            return Absent(AbsenceReason.PARTIAL, SOURCE, words, scraped_at)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return Absent(AbsenceReason.PARTIAL, SOURCE, f"{where}: {first['msg']}", scraped_at)
    except ValueError as error:
        return Absent(AbsenceReason.PARTIAL, SOURCE, str(error), scraped_at)
    return Present(state, SOURCE, scraped_at)


def _take(
    one: Series,
    number: float,
    values: dict[str, Any],
    buckets: dict[str, dict[str, float]],
    sums: dict[str, float],
) -> None:
    labels = one.labels
    match one.query:
        case query if query.startswith(BUCKETS):
            name = labels.get("__name__", "").removesuffix("_bucket")
            buckets[name][labels.get("le", "")] = number
        case "sums":
            sums[labels.get("__name__", "").removesuffix("_sum")] = number
        case "blocks":
            # Such labels are keys, never paths: they are whatever the Pod exports.
            blocks = values.setdefault("occupancy", {})
            blocks[f"{labels.get('state', '')}_blocks"] = _whole(number)
        case "refused":
            refused = values.setdefault("traffic", {}).setdefault("refused", {})
            refused[labels.get("reason", "")] = _whole(number)
        case "drain":
            _put(values, "drain.phase", labels.get("phase", ""))
        case "executor":
            texts = ("type", "device", "compute_dtype", "kv_dtype", "time_scale")
            values["executor"] = {name: labels.get(name, "") for name in texts}
        case "model":
            values["model"] = {
                "uri": labels.get("uri", ""),
                "digest": labels.get("digest", ""),
                "served_names": tuple(labels.get("served_names", "").split(",")),
            }
        case "limits":
            _put(values, "limits.hash", labels.get("hash", ""))
            _put(values, "limits.own_hash", labels.get("own_hash", ""))
            _put(values, "limits.requested_hash", labels.get("requested_hash") or None)
            _put(values, "limits.applied.charge", labels.get("charge", ""))
            _put(values, "limits.applied.mode", labels.get("mode", ""))
        case _:
            path = _PATHS.get(labels.get("__name__", ""))
            if path is not None:
                _put(values, path, number)


_PATHS: Mapping[str, str] = {
    metric.name: metric.path
    for metric in STATE_METRICS
    if metric.kind is not MetricKind.HISTOGRAM and not metric.labels and metric.key_label is None
}
_HISTOGRAM_PATHS: Mapping[str, str] = {
    metric.name: metric.path for metric in STATE_METRICS if metric.kind is MetricKind.HISTOGRAM
}

_NAMES: Mapping[str, str] = {metric.path: metric.name for metric in STATE_METRICS}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST_NUMBER else None


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = _whole(value) if isinstance(value, float) else value


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number


def _put_histograms(
    values: dict[str, Any], buckets: Mapping[str, Mapping[str, float]], sums: Mapping[str, float]
) -> None:
    for name, path in _HISTOGRAM_PATHS.items():
        if name in buckets:
            histogram: dict[str, Any] = {"counts": counts_from_buckets(buckets[name])}
            if name in sums:
                histogram["sum_seconds"] = sums[name]
            _put(values, path, histogram)


def _without_incomplete(values: dict[str, Any]) -> dict[str, Any]:
    """`ready` and the drain's flag are 0 or 1 in Prometheus; a part that a loading replica does
    not know yet has no series at all, and stays absent."""
    result = dict(values)
    if "ready" in result:
        result["ready"] = bool(result["ready"])
    capacity = result.get("capacity")
    if isinstance(capacity, dict) and "occupancy" in result:
        # These two are one fact each in the state; the page exports them once.
        capacity.setdefault("kv_blocks", result["occupancy"].get("capacity_blocks"))
        limits = result.get("limits", {}).get("applied", {})
        capacity.setdefault("max_sequences", limits.get("max_sequences"))
    return result
