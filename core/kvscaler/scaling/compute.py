"""DecodeCompute: replicas whose steps are short enough for the time per output token.

Memory alone starved loads that prefill or decode binds. A token comes every t0/(1 - ρ) seconds,
with ρ the share of time that requests' own work takes, so a target bounds ρ and with it the rate.
Planning for 0.8 of the target leaves room for what the steady state does not show.
"""

from kvscaler.performance.step_time import MAX_UTILIZATION
from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.decision import Candidate, Constraint, Input
from kvscaler.scaling.demand import Demand
from kvscaler.scaling.operating import request_work
from kvscaler.scaling.rounding import replicas_for
from kvscaler.scaling.spec import ScalingSpec

TARGET_SHARE = 0.8


def decode_compute(
    spec: ScalingSpec, capacity: ReplicaCapacity, demand: Demand, now: float
) -> Candidate | None:
    """Replicas for compute; `None` while lengths, arrivals or step times are unknown."""
    window, rate, model = demand.window, demand.arrivals, capacity.slowest_step_time
    if window is None or rate is None or model is None or window.lengths is None:
        return None
    work = request_work(window.lengths)
    hits = window.prefix_hit_share or 0.0
    seconds = model.work_seconds(work, hits)
    if seconds <= 0:
        return None
    target = spec.time_per_output_token_seconds
    per_replica = MAX_UTILIZATION / seconds
    goal = f"a utilization below {MAX_UTILIZATION:.0%}"
    if target is not None:
        reachable = model.rate_for(work, TARGET_SHARE * target, hits)
        if reachable is None:
            goal += (
                f" (no number of replicas reaches {target * 1e3:.0f} ms per token: an idle step"
                f" takes {model.base_seconds * 1e3:.0f} ms)"
            )
        else:
            per_replica = reachable
            goal = f"{TARGET_SHARE * target * 1e3:.0f} ms per token"
    needed = rate.per_second / per_replica
    age = now - window.time
    return Candidate(
        Constraint.DECODE_COMPUTE,
        replicas_for(needed),
        needed,
        f"{rate.per_second:.2f} req/s ({age:.0f} s old) x {seconds * 1e3:.0f} ms of step time each"
        f" at {goal} needs {needed:.1f} replicas",
        (
            Input("arrivals", rate.per_second, "requests/s", age),
            Input("workPerRequest", seconds, "s", age),
            Input("ratePerReplica", per_replica, "requests/s"),
        ),
    )
