"""What each constraint asks for, who binds, and in which words."""

from dataclasses import replace

import pytest
from kvscaler.scaling import (
    Constraint,
    DecisionReason,
    History,
    ReplicaPhase,
    ScalingSpec,
)
from kvscaler.scaling.decision import Decision
from kvscaler.scaling.demand import arrivals
from kvscaler.scaling.memory import ROOM_SIGMAS, share_per_replica
from kvscaler.traffic import AbsenceReason, Absent, Rate

from tests.core.scaling.situations import (
    H100,
    NOW,
    READY,
    WARMING,
    capacity,
    fleet,
    old,
    settle,
    traffic,
    use,
)
from tests.core.scaling.small_fleet import limits


def candidate(decision: Decision, constraint: Constraint) -> int:
    return next(c.replicas for c in decision.candidates if c.constraint is constraint)


def test_memory_is_littles_law_with_room_for_bursts():
    decision = settle(seen=traffic(level=3.0))
    # 3 req/s x 80 blocks·s = 240 blocks; a replica of 100 carries y with y + 0.7·√(10 y) = 100.
    share = share_per_replica(100, 10.0, ROOM_SIGMAS)
    assert share + ROOM_SIGMAS * (10 * share) ** 0.5 == pytest.approx(100)
    needed = next(c.needed for c in decision.candidates if c.constraint is Constraint.MEMORY)
    assert needed == pytest.approx(240 / share)
    assert decision.desired_replicas == 3
    assert decision.binding_constraint is Constraint.MEMORY
    assert decision.reason is DecisionReason.SCALE_UP


def test_the_message_has_the_numbers_their_age_and_the_runner_up():
    decision = settle(seen=traffic(level=3.0))
    assert decision.message.startswith(
        "Memory: 3.00 req/s over 45 s x 80.0 blocks·s (0 s old) is 240 blocks in use;"
    )
    assert "needs 3.0 replicas of 100 blocks" in decision.message
    assert decision.message.endswith("; next: Queue 3")
    assert {i.name for i in decision.inputs} >= {"arrivals", "kvPerRequest", "usableBlocks"}


def test_a_step_is_taken_from_12_s_only_when_counts_can_mean_it():
    assert arrivals(Rate(12, 45), Rate(4, 12)).window_seconds == 45
    step = arrivals(Rate(46, 45), Rate(36, 12))
    assert step.window_seconds == 12
    # The mean of which 36 or more come once in six times, as one standard error: about 36 - √36.
    assert step.per_second == pytest.approx(30.031 / 12, rel=1e-4)
    assert arrivals(Rate(1, 45), Rate(1, 12)).window_seconds == 45
    assert arrivals(Rate(3, 5), Rate(3, 5)) is None


def test_a_jump_that_has_just_begun_is_taken_from_4_s():
    begun = arrivals(Rate(21, 45), Rate(11, 12), Rate(9, 4))
    assert begun.window_seconds == 4
    # One standard error for 12 s is 1.6 for the best of three windows of 4 s.
    assert begun.per_second == pytest.approx(4.74 / 4, rel=1e-2)
    # At 0.3 a second, seven within 4 s come about by themselves.
    assert arrivals(Rate(19, 45), Rate(9, 12), Rate(7, 4)).window_seconds == 45


def test_the_last_4_s_count_for_the_first_answer_only():
    jump = traffic(level=0.3, short=0.3, burst=4.0)
    first = settle(seen=jump)
    assert first.desired_replicas > 1
    assert "over 4 s" in first.message
    under_way = settle(seen=jump, pods=fleet(READY, WARMING))
    assert under_way.desired_replicas == 2


def test_a_queue_asks_for_more_before_arrivals_can_tell():
    decision = settle(seen=traffic(level=0.3, short=0.9), live=[use(reserved=95, waiting=40)])
    assert decision.desired_replicas == 2
    assert decision.binding_constraint is Constraint.MEMORY
    assert "95 blocks reserved and 40 waiting" in decision.message


def test_a_queue_that_is_admitted_at_once_asks_for_nothing():
    decision = settle(seen=traffic(level=0.8), live=[use(reserved=95, waiting=10)])
    assert decision.desired_replicas == 1


def test_queue_works_off_a_backlog_over_the_drain_time():
    pods = fleet(READY, READY, READY)
    busy = [use(reserved=90, waiting=600) for _ in range(3)]
    decision = settle(seen=traffic(level=3.0), live=busy, pods=pods)
    # 180 waiting x 80 blocks·s over 90 s are 160 blocks beside the 240 of arrivals.
    assert candidate(decision, Constraint.QUEUE) == 4


def test_refusals_count_as_demand_when_sizes_are_unknown():
    seen = traffic(level=1.0, refused=0.5, lengths=None)
    decision = settle(seen=seen, live=[use(reserved=50)])
    assert decision.desired_replicas == 2
    assert decision.binding_constraint is Constraint.QUEUE
    assert "refused for want of capacity" in decision.message


def test_decode_compute_keeps_tokens_on_time():
    spec = ScalingSpec(1, 10, time_per_output_token_seconds=0.010)
    room = capacity(blocks=20_000, sequences=5_000, step_time=H100)
    decision = settle(spec, room=room, seen=traffic(level=120.0))
    assert decision.binding_constraint is Constraint.DECODE_COMPUTE
    assert decision.desired_replicas > 1
    assert "8 ms per token" in decision.message


def test_a_target_that_no_number_of_replicas_reaches_does_not_ask_for_all_of_them():
    spec = ScalingSpec(1, 10, time_per_output_token_seconds=0.001)
    room = capacity(blocks=20_000, step_time=H100)
    decision = settle(spec, room=room, seen=traffic(level=10.0))
    assert decision.desired_replicas == 1
    compute = next(c for c in decision.candidates if c.constraint is Constraint.DECODE_COMPUTE)
    assert "no number of replicas reaches 1 ms" in compute.explanation


def test_minimum_and_maximum_bind_by_name():
    low = settle(ScalingSpec(2, 5), pods=fleet(READY, READY))
    assert (low.desired_replicas, low.binding_constraint) == (2, Constraint.MIN_REPLICAS)
    assert low.reason is DecisionReason.AT_MINIMUM
    high = settle(ScalingSpec(1, 2), seen=traffic(level=9.0))
    assert (high.desired_replicas, high.binding_constraint) == (2, Constraint.MAX_REPLICAS)
    assert high.runner_up is not None
    assert high.runner_up.constraint is Constraint.MEMORY


def test_ten_percent_more_than_there_is_passes_as_enough():
    pods = fleet(READY, READY, READY, since=0.0)
    decision = settle(seen=traffic(level=3.1), pods=pods)
    assert candidate(decision, Constraint.MEMORY) == 4
    assert decision.desired_replicas == 3
    assert "3 are within 10% of it" in decision.message


def test_a_lowered_maximum_shrinks_without_waiting():
    pods = fleet(*[READY] * 4)
    decision = settle(ScalingSpec(1, 2), pods=pods, history=History.fresh(NOW, 4))
    assert decision.desired_replicas == 2
    assert len(decision.victims) == 2


def test_limits_are_those_of_the_capacity_and_absent_with_it():
    assert settle().limits == limits(100, watermark=0)
    absent = Absent(AbsenceReason.MISSING, "budget", "model facts are not known yet")
    decision = settle(room=absent)
    assert decision.limits is None
    assert decision.binding_constraint is Constraint.SIGNAL_HOLD
    assert "model facts are not known yet" in decision.message


def test_least_loaded_replicas_go_first_and_those_that_serve_nobody_before_them():
    pods = fleet(READY, READY, WARMING, READY, target=4)
    live = [use(reserved=20), use(reserved=5), Absent(AbsenceReason.MISSING, "d"), use(reserved=9)]
    decision = settle(pods=pods, live=live)
    assert decision.desired_replicas == 1
    assert decision.victims == ("p2", "p1", "p3")


def test_draining_replicas_are_not_chosen_again():
    pods = fleet(READY, READY, ReplicaPhase.DRAINING, target=2)
    decision = settle(pods=pods, live=[use(reserved=20), use(reserved=9), use(reserved=50)])
    assert decision.desired_replicas == 1
    assert decision.victims == ("p1",)


def test_no_replica_ready_keeps_what_is_asked_for():
    decision = settle(pods=fleet(WARMING, target=3), history=old(3))
    assert (decision.desired_replicas, decision.reason) == (3, DecisionReason.STARTING)
    assert decision.active


def test_a_clock_set_back_neither_shrinks_nor_stands_still():
    spec = ScalingSpec(1, 10, stabilization_seconds=60.0)
    ahead = History.fresh(NOW + 3600.0, 4)
    pods = fleet(*[READY] * 4, since=0.0)
    held = settle(spec, pods=pods, history=ahead)
    assert (held.desired_replicas, held.reason) == (4, DecisionReason.STABILIZING)
    assert max(want.time for want in held.history.wants) == NOW
    shrunk = settle(spec, pods=pods, history=ahead.not_after(NOW - 61.0))
    assert (shrunk.desired_replicas, shrunk.reason) == (1, DecisionReason.SCALE_DOWN)
    assert ahead.not_after(NOW + 3600.0) is ahead
    lost = replace(ahead, signals_lost_at=NOW + 3600.0).not_after(NOW)
    assert (lost.started_at, lost.signals_lost_at) == (NOW, NOW)


def test_readiness_in_the_far_future_is_no_growth_under_way():
    assert fleet(READY, READY, since=NOW).scaled_up_within(NOW, 30.0)
    assert not fleet(READY, READY, since=NOW + 3600.0).scaled_up_within(NOW, 30.0)


def test_bounds_that_contradict_are_refused():
    with pytest.raises(ValueError, match="1 <= min <= max, not min 5, max 2"):
        ScalingSpec(5, 2)
