"""Behaviour: how fast the fleet may follow what the constraints want.

Up at once, because a total is asked for and not an increment: Pods that are starting are part of
it, so asking again changes nothing. Down only to the largest number wanted over the stabilization
window, only as far as live KV fits, never during a rollout. After a restart the window is seeded
with the fleet that is there.
"""

from dataclasses import dataclass

from kvscaler.scaling.decision import DecisionReason
from kvscaler.scaling.demand import LiveLoad
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.scaling.history import History
from kvscaler.scaling.rounding import replicas_for
from kvscaler.scaling.spec import ScalingSpec


@dataclass(frozen=True, slots=True)
class Paced:
    """Replicas after behaviour. `held` says that behaviour, not a constraint, set the number."""

    replicas: int
    reason: DecisionReason
    held: bool
    words: str = ""


def pace(
    spec: ScalingSpec,
    wanted: int,
    usable_blocks: int,
    live: LiveLoad | None,
    fleet: FleetView,
    history: History,
) -> Paced:
    """From what is wanted (within minimum and maximum) to what is asked for now.

    `history` holds this want already.
    """
    target = max(fleet.target_replicas, spec.min_replicas)
    if wanted > target:
        return _grow(wanted, target, fleet)
    if wanted == target:
        return Paced(wanted, DecisionReason.STEADY, held=False)
    if target > spec.max_replicas:
        # The maximum was lowered: someone's wish, for which there is nothing to wait.
        return Paced(spec.max_replicas, DecisionReason.AT_MAXIMUM, held=False)
    if fleet.rollout_in_progress:
        words = f"{wanted} would do; not fewer than {target} before the rollout is done"
        return Paced(target, DecisionReason.ROLLOUT_IN_PROGRESS, held=True, words=words)
    stable = min(target, max(wanted, min(history.highest_want(), spec.max_replicas)))
    if stable == target:
        words = f"{wanted} would do; {target} were wanted within the last"
        words += f" {spec.stabilization_seconds:.0f} s"
        return Paced(target, DecisionReason.STABILIZING, held=True, words=words)
    fitting = stable
    if live is not None:
        fitting = min(target, max(stable, replicas_for(live.blocks / usable_blocks)))
    if fitting == target:
        assert live is not None
        words = f"{stable} would do for the traffic; {live.blocks} live blocks need {target}"
        return Paced(target, DecisionReason.KV_DOES_NOT_FIT, held=True, words=words)
    words = (
        f"{wanted} would do; shrinking from {target} to {fitting}, for what was wanted within the"
    )
    words += f" last {spec.stabilization_seconds:.0f} s and for live KV"
    return Paced(fitting, DecisionReason.SCALE_DOWN, held=fitting > wanted, words=words)


def _grow(wanted: int, target: int, fleet: FleetView) -> Paced:
    stuck = fleet.count(ReplicaPhase.UNSCHEDULABLE)
    if stuck:
        words = f"{wanted} are needed, but {stuck} replicas can't be scheduled: more would not be"
        return Paced(target, DecisionReason.REPLICAS_UNSCHEDULABLE, held=True, words=words)
    crashing = fleet.count(ReplicaPhase.CRASH_LOOPING)
    if crashing and not fleet.count(ReplicaPhase.READY):
        words = f"{wanted} are needed, but all that started crash ({crashing}): more would, too"
        return Paced(target, DecisionReason.REPLICAS_CRASH_LOOPING, held=True, words=words)
    return Paced(wanted, DecisionReason.SCALE_UP, held=False)
