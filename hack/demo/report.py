"""The proof at the end: figures by phase, and checks that decide the exit code."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hack.demo.observe import Observer, Sample
from hack.demo.traffic import Request, Result
from hack.demo.view import quantile

ADMITTED_PEAK_SHARE = 1.8
"""Admitted blocks must peak at this many times one replica's capacity."""
NEEDED_SHARE = (2.4, 2.6)
"""What the spike must need, in replicas' worth of KV blocks."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with one arrival rate; seconds on the monotonic clock."""

    name: str
    begin: float
    end: float
    rate_per_second: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives of the service, as its object states them."""

    time_to_first_token_seconds: float
    time_per_output_token_seconds: float


@dataclass(frozen=True, slots=True)
class Check:
    """One condition for exit code 0, with what was seen."""

    name: str
    holds: bool
    seen: str

    def as_json(self) -> dict[str, Any]:
        """The check as a JSON object."""
        return {"name": self.name, "holds": self.holds, "seen": self.seen}


def meets(request: Request, objectives: Objectives) -> bool:
    """Whether an offered request met both objectives; refused and broken ones did not."""
    if request.result is not Result.OK or request.first_token_seconds is None:
        return False
    gaps = request.token_gaps_seconds
    per_token = sum(gaps) / len(gaps) if gaps else 0.0
    return (
        request.first_token_seconds <= objectives.time_to_first_token_seconds
        and per_token <= objectives.time_per_output_token_seconds
    )


def latencies(requests: Iterable[Request]) -> dict[str, float | None]:
    """Quantiles of time to first token and of the gaps between tokens, in seconds."""
    rows = list(requests)
    first = [r.first_token_seconds for r in rows if r.first_token_seconds is not None]
    gaps = [gap for r in rows for gap in r.token_gaps_seconds]
    return {
        f"{name}_p{int(100 * share)}_seconds": quantile(values, share)
        for name, values in (("time_to_first_token", first), ("inter_token", gaps))
        for share in (0.5, 0.9, 0.99)
    }


def by_phase(
    requests: list[Request], phases: list[Phase], objectives: Objectives
) -> list[dict[str, Any]]:
    """Counts, attainment and latencies of each phase; a request belongs to its arrival's."""
    rows = []
    for phase in phases:
        mine = [r for r in requests if phase.begin <= r.offered_at < phase.end]
        counts = {result.value: sum(1 for r in mine if r.result is result) for result in Result}
        met = sum(1 for r in mine if meets(r, objectives))
        rows.append(
            {
                "phase": phase.name,
                "seconds": round(phase.end - phase.begin, 1),
                "rate_per_second": round(phase.rate_per_second, 3),
                "offered": len(mine),
                **counts,
                "attainment": met / len(mine) if mine else None,
                **latencies(mine),
            }
        )
    return rows


def scale_up(samples: list[Sample], spike: Phase) -> dict[str, Any]:
    """When the spike was answered: patch, first new Pod Ready, and the decision's own words."""
    before = [s for s in samples if s.at < spike.begin]
    base = before[-1].desired if before else 1
    base_ready = before[-1].ready if before else 1
    patched = next((s for s in samples if s.at >= spike.begin and (s.desired or 0) > (base or 0)),
                   None)  # fmt: skip
    ready = next((s for s in samples if s.at >= spike.begin and s.ready > base_ready), None)
    decided = next(
        (
            s.service["status"]["decision"]
            for s in samples
            if s.at >= spike.begin
            and s.service
            and (s.service.get("status", {}).get("decision") or {}).get("desiredReplicas", 0)
            > (base or 0)
        ),
        None,
    )
    return {
        "to_patch_seconds": round(patched.at - spike.begin, 2) if patched else None,
        "to_new_pod_ready_seconds": round(ready.at - spike.begin, 2) if ready else None,
        "binding_constraint": decided.get("bindingConstraint") if decided else None,
        "message": decided.get("message") if decided else None,
    }


def start_seconds(observer: Observer) -> dict[str, float]:
    """Seconds from a Pod's first sight to Ready, by Pod."""
    first: dict[str, float] = {}
    ready: dict[str, float] = {}
    for sample in observer.samples:
        for pod in sample.pods:
            first.setdefault(pod.name, sample.at)
            if pod.ready:
                ready.setdefault(pod.name, sample.at)
    return {name: round(at - first[name], 1) for name, at in ready.items()}


def capacity_blocks(samples: list[Sample]) -> int:
    """Blocks of one replica, as the replicas report them."""
    seen = [
        pod.state["capacity"]["kv_blocks"]
        for sample in samples
        for pod in sample.pods
        if pod.state and pod.state.get("capacity")
    ]
    return min(seen) if seen else 0


def refusal_rates(
    requests: list[Request], samples: list[Sample], spike: Phase
) -> tuple[float | None, float | None, float | None]:
    """Refusals a second in the spike until all wanted Pods were ready, and from then on.

    Also the moment, in seconds from the spike's begin; `None` where it never came.
    """
    inside = [s for s in samples if spike.begin <= s.at < spike.end]
    most = max((s.ready for s in inside), default=0)
    first = inside[0].ready if inside else 0
    full = next((s.at for s in inside if s.ready == most and most > first), None)
    if full is None:
        return None, None, None

    def rate(begin: float, end: float) -> float | None:
        count = sum(
            1 for r in requests if r.result is Result.REFUSED and begin <= r.offered_at < end
        )
        return count / (end - begin) if end - begin > 1 else None

    return rate(spike.begin, full), rate(full, spike.end), full - spike.begin


def needed_replicas(samples: list[Sample], spike: Phase, capacity: int) -> float | None:
    """What the spike's arrivals needed, in replicas' worth of blocks, by Little's law.

    Arrival rate x mean of the integral of blocks over a finished request's life, as the replicas
    measured it during the spike, over one replica's blocks.
    """
    begin: dict[str, tuple[float, float]] = {}
    end: dict[str, tuple[float, float]] = {}
    for sample in samples:
        if not spike.begin <= sample.at < spike.end:
            continue
        for pod in sample.pods:
            if pod.state:
                traffic = pod.state["traffic"]
                pair = (traffic["finished_block_seconds"], traffic["finished"])
                begin.setdefault(pod.uid, pair)
                end[pod.uid] = pair
    block_seconds = sum(end[uid][0] - begin[uid][0] for uid in end)
    finished = sum(end[uid][1] - begin[uid][1] for uid in end)
    if not finished or not capacity:
        return None
    return spike.rate_per_second * block_seconds / finished / capacity


def judge(
    observer: Observer,
    requests: list[Request],
    phases: list[Phase],
    operator_errors: list[str],
    maximum: int,
    minimum: int,
    admitted_peak_share: float = ADMITTED_PEAK_SHARE,
) -> list[Check]:
    """The conditions of the demo, each with what was seen."""
    samples = observer.samples
    spike = next(p for p in phases if p.name == "spike")
    answer = scale_up(samples, spike)
    capacity = capacity_blocks(samples)
    admitted = max((s.blocks("reserved_blocks") for s in samples if s.at >= spike.begin), default=0)
    peak_desired = max((s.desired or 0 for s in samples), default=0)
    before, after, _ = refusal_rates(requests, samples, spike)
    broken = [r for r in requests if r.result is Result.BROKEN]
    unfinished = [r for r in requests if r.result is None]
    restarts = sorted({f"{p.name}: {p.restarts} restarts {p.last_termination}"
                       for s in samples for p in s.pods if p.restarts})  # fmt: skip
    last = samples[-1]
    share = admitted / capacity if capacity else 0.0
    return [
        Check("scale-up's binding constraint was Memory",
              answer["binding_constraint"] == "Memory", str(answer["binding_constraint"])),
        Check(f"admitted blocks peaked at >= {admitted_peak_share} x one replica's",
              share >= admitted_peak_share, f"{admitted} of {capacity}: {share:.2f} x"),
        Check("refusals fell after the new Pods were Ready",
              before is not None and after is not None and after < before,
              f"{before} -> {after} a second"),
        Check(f"replicas stayed below the maximum of {maximum}",
              peak_desired < maximum, f"peak {peak_desired}"),
        Check(f"replicas returned to the minimum of {minimum}",
              last.desired == minimum and last.ready == minimum and len(last.pods) == minimum,
              f"desired {last.desired}, ready {last.ready}, Pods {len(last.pods)}"),
        Check("no stream broke", not broken and not unfinished,
              f"{len(broken)} broken, {len(unfinished)} unfinished"
              + (f": {broken[0].reason}" if broken else "")),
        Check("nothing restarted or ran out of memory", not restarts, "; ".join(restarts) or "0"),
        Check("the operator logged no error", not operator_errors,
              f"{len(operator_errors)}" + (f": {operator_errors[0]}" if operator_errors else "")),
    ]  # fmt: skip


def operator_restarts(pod: dict[str, Any]) -> list[str]:
    """Restarts of the operator's containers, in words: a log begins anew with each of them."""
    return [
        f"container {c['name']} restarted {c['restartCount']} times: {c.get('lastState')}"
        for c in pod["status"]["containerStatuses"]
        if c["restartCount"]
    ]


def timeline(samples: list[Sample], start: float) -> list[dict[str, Any]]:
    """Samples as flat rows, times relative to `start`."""
    rows = []
    for s in samples:
        decision = ((s.service or {}).get("status") or {}).get("decision") or {}
        rows.append(
            {
                "at": round(s.at - start, 2),
                "desired": s.desired,
                "ready": s.ready,
                "pods": len(s.pods),
                "referenced_blocks": s.blocks("referenced_blocks"),
                "reserved_blocks": s.blocks("reserved_blocks"),
                "capacity_blocks": s.blocks("capacity_blocks"),
                "waiting_requests": s.blocks("waiting_requests"),
                "running_requests": s.blocks("running_requests"),
                "binding_constraint": decision.get("bindingConstraint"),
            }
        )
    return rows
