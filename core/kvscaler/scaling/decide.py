"""The one function that sets replicas and limits, the same in operator and simulator.

Signals that are missing are handled here and nowhere else. What is known of a part of the fleet is
a lower bound, so it may grow the fleet; only a complete look may shrink it. With nothing known the
last decision stands, and after `hold_seconds` the decision is called inactive: replicas stay as
they are, and whoever reads the status learns that nobody is deciding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvscaler.protocol.state import OccupancyReport
from kvscaler.scaling.behaviour import Paced, pace
from kvscaler.scaling.candidates import candidates_for
from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.decision import Candidate, Constraint, Decision, DecisionReason, Unknown
from kvscaler.scaling.demand import Demand, demand
from kvscaler.scaling.fleet import FleetView, ReplicaPhase
from kvscaler.scaling.history import History
from kvscaler.scaling.rounding import replicas_for
from kvscaler.scaling.spec import ScalingSpec
from kvscaler.scaling.victims import victims
from kvscaler.traffic.signal import Absent, Signal, utc
from kvscaler.traffic.window import TrafficWindow

TOLERANCE = 0.1
"""Share by which a need may exceed what is there before the fleet grows, as in the HPA."""

BRIEF_LOSS_SECONDS = 30.0
"""A loss of signals shorter than this leaves the stabilization window as it is; after a longer one
the window starts anew, because nobody knows what was wanted meanwhile."""


@dataclass(frozen=True, slots=True)
class _Situation:
    """The arguments of one decision, and what was made of them so far."""

    spec: ScalingSpec
    capacity: Signal[ReplicaCapacity]
    traffic: Signal[TrafficWindow]
    occupancy: Mapping[str, Signal[OccupancyReport]]
    fleet: FleetView
    now: float
    look: Demand
    candidates: tuple[Candidate, ...]
    unknown: tuple[Unknown, ...]

    def clamp(self, replicas: int) -> int:
        """Within minimum and maximum."""
        return max(self.spec.min_replicas, min(self.spec.max_replicas, replicas))


def decide(
    spec: ScalingSpec,
    capacity: Signal[ReplicaCapacity],
    traffic: Signal[TrafficWindow],
    occupancy: Mapping[str, Signal[OccupancyReport]],
    fleet: FleetView,
    history: History,
    now: float,
) -> Decision:
    """Desired replicas and limits. Level-based: the same arguments give the same decision.

    `occupancy` is keyed by Pod UID; a ready replica that is not in it counts as missing.
    """
    history = history.not_after(now)
    look = demand(traffic, occupancy, fleet, capacity)
    candidates, unknown = candidates_for(spec, capacity, look, fleet, now)
    at = _Situation(spec, capacity, traffic, occupancy, fleet, now, look, candidates, unknown)
    held = at.clamp(max(history.last_desired, fleet.target_replicas))
    if fleet.count(ReplicaPhase.READY) == 0:
        return _without_replicas(at, held)
    measured = any(c.constraint is not Constraint.MIN_REPLICAS for c in candidates)
    complete = look.complete and measured
    history = _note_signals(history, held, now, complete=complete)
    wanted = at.clamp(max(_tolerant(c, fleet.target_replicas) for c in candidates))
    if not complete and wanted <= held:
        return _hold(at, history, held)
    history = history.observe(now, wanted, spec.stabilization_seconds)
    usable = 1 if isinstance(capacity, Absent) else capacity.value.usable_blocks
    return _conclude(at, history, pace(spec, wanted, usable, look.live, fleet, history))


def _tolerant(candidate: Candidate, target: int) -> int:
    """What a candidate asks for, growth reduced by the tolerance: noise alone adds no replica."""
    if candidate.constraint is Constraint.MIN_REPLICAS or candidate.replicas <= target:
        return candidate.replicas
    return max(target, replicas_for(candidate.needed / (1.0 + TOLERANCE)))


def _note_signals(history: History, held: int, now: float, *, complete: bool) -> History:
    """Remember since when signals are incomplete; start the window anew after a long loss."""
    lost_at = history.signals_lost_at
    if not complete:
        return history if lost_at is not None else replace(history, signals_lost_at=now)
    if lost_at is None:
        return history
    if now - lost_at > BRIEF_LOSS_SECONDS:
        return History.fresh(now, held)
    return replace(history, signals_lost_at=None)


def _why_incomplete(at: _Situation) -> str:
    live = at.look.live
    if isinstance(at.capacity, Absent):
        return f"capacity {at.capacity}"
    if isinstance(at.traffic, Absent):
        return f"traffic {at.traffic}"
    if live is None:
        return "occupancy Missing: no ready replica reported it"
    if live.reporting < live.expected:
        return f"occupancy Partial: {live.reporting} of {live.expected} replicas reported"
    return f"traffic Partial: {at.traffic.value.coverage:.0%} of the replicas reported"


def _without_replicas(at: _Situation, held: int) -> Decision:
    """Nobody serves, so there is nothing to measure: keep what is asked for until someone does."""
    reason, words = DecisionReason.STARTING, "no replica is ready yet"
    if at.fleet.count(ReplicaPhase.UNSCHEDULABLE):
        reason = DecisionReason.REPLICAS_UNSCHEDULABLE
        words = "no replica is ready, and some can't be scheduled"
    elif at.fleet.count(ReplicaPhase.CRASH_LOOPING):
        reason = DecisionReason.REPLICAS_CRASH_LOOPING
        words = "no replica is ready, and some crash"
    paced = Paced(held, reason, held=True, words=f"{words}: {held} stay asked for")
    return _conclude(at, History.fresh(at.now, held), paced)


def _hold(at: _Situation, history: History, held: int) -> Decision:
    since = at.now if history.signals_lost_at is None else history.signals_lost_at
    lost, bound = at.now - since, at.spec.hold_seconds
    if lost <= bound:
        reason = DecisionReason.HOLDING
        words = f"holding {held} replicas since {utc(since)}, for at most {bound:.0f} s"
    else:
        reason = DecisionReason.HOLD_EXPIRED
        words = f"for more than {bound:.0f} s since {utc(since)}: nothing is decided any more, and"
        words += f" {held} replicas stay"
    return _decision(
        at,
        history,
        replicas=held,
        constraint=Constraint.SIGNAL_HOLD,
        reason=reason,
        words=f"{_why_incomplete(at)}; {words}",
        runner_up=at.candidates[0],
    )


def _conclude(at: _Situation, history: History, paced: Paced) -> Decision:
    """The decision when signals allow one: who binds, and what would bind next."""
    top = at.candidates[0]
    constraint, reason, words = top.constraint, paced.reason, top.explanation
    runner_up = at.candidates[1] if len(at.candidates) > 1 else None
    if paced.held:
        constraint, words, runner_up = Constraint.BEHAVIOUR, paced.words, top
    elif top.replicas > at.spec.max_replicas == paced.replicas:
        constraint, runner_up = Constraint.MAX_REPLICAS, top
        words = f"maxReplicas is {at.spec.max_replicas}"
        reason = DecisionReason.AT_MAXIMUM if reason is DecisionReason.STEADY else reason
    elif top.replicas > paced.replicas:
        words += f"; {paced.replicas} are within {TOLERANCE:.0%} of it"
    elif top.constraint is Constraint.MIN_REPLICAS and reason is DecisionReason.STEADY:
        reason = DecisionReason.AT_MINIMUM
    return _decision(
        at,
        history,
        replicas=paced.replicas,
        constraint=constraint,
        reason=reason,
        words=words,
        runner_up=runner_up,
    )


def _decision(
    at: _Situation,
    history: History,
    *,
    replicas: int,
    constraint: Constraint,
    reason: DecisionReason,
    words: str,
    runner_up: Candidate | None,
) -> Decision:
    message = f"{constraint}: {words}"
    if runner_up is not None:
        message += f"; next: {runner_up.constraint} {runner_up.replicas}"
        if constraint not in {c.constraint for c in at.candidates}:
            message += f" ({runner_up.explanation})"
    used = [c for c in (at.candidates[0], runner_up) if c is not None]
    inputs = {i.name: i for c in reversed(used) for i in c.inputs}
    shrinks = replicas < at.fleet.target_replicas
    return Decision(
        desired_replicas=replicas,
        binding_constraint=constraint,
        reason=reason,
        message=message,
        candidates=at.candidates,
        runner_up=runner_up,
        unknown=at.unknown,
        inputs=tuple(inputs.values()),
        limits=None if isinstance(at.capacity, Absent) else at.capacity.value.limits,
        victims=victims(replicas, at.fleet, at.occupancy) if shrinks else (),
        active=reason is not DecisionReason.HOLD_EXPIRED,
        time=at.now,
        history=replace(history, last_desired=replicas),
    )
