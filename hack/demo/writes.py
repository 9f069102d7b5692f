"""How much the operator writes, from its own counters: a quiet fleet must cost nothing."""

import re
from collections.abc import Mapping

from hack.demo.kube import Kube

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_REQUESTS = re.compile(r"^rest_client_requests_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoCountersError(Exception):
    """The page has none of the counters: nothing is known, which is not the same as no writes."""


def writes(page: str) -> dict[str, float]:
    """Writes so far as "METHOD resource", Leases apart, from the operator's metrics page."""
    found: dict[str, float] = {}
    series = [(dict(_LABEL.findall(labels)), value) for labels, value in _REQUESTS.findall(page)]
    if not series:
        raise NoCountersError("the operator's metrics have no rest_client_requests_total")
    for labels, value in series:
        if labels["method"] in WRITES and labels["resource"] != "leases":
            key = f"{labels['method']} {labels['resource']}"
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def operator_writes(kube: Kube, namespace: str, pod: str) -> dict[str, float]:
    """`writes` of the operator that runs in this Pod."""
    return writes(await kube.text(f"/api/v1/namespaces/{namespace}/pods/{pod}:8080/proxy/metrics"))


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was written between two looks, without what stayed."""
    changed = {key: count - before.get(key, 0.0) for key, count in after.items()}
    return {key: count for key, count in changed.items() if count}
