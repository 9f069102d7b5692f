"""Ways in which other autoscalers went wrong, by the numbers of the survey of peers.

`pitfall_N` is the survey's number, `policy_N` that of the policy study. Those about counters and
lengths (6, 7, 13, policy 6) are in the tests of traffic.
"""

from dataclasses import replace

import pytest
from kvscaler.scaling import (
    Constraint,
    DecisionReason,
    History,
    ReplicaCapacity,
    ReplicaPhase,
    ScalingSpec,
    decide,
)
from kvscaler.traffic import AbsenceReason, Absent, number

from tests.core.scaling.situations import (
    NOW,
    READY,
    SPEC,
    WARMING,
    capacity,
    fleet,
    old,
    settle,
    traffic,
    use,
)
from tests.core.scaling.small_fleet import limits

MISSING = Absent(AbsenceReason.MISSING, "prometheus")
STALE = Absent(AbsenceReason.STALE, "direct", "40 s old", NOW - 40)
NAN = number("NaN", "prometheus", NOW)


def test_pitfall_1_and_2_starting_replicas_count_so_that_asking_again_adds_nothing():
    pods = fleet(READY, WARMING, WARMING, target=3)
    full = [use(reserved=100, waiting=400), MISSING, MISSING]
    history = old(3)
    for second in range(60):
        decision = settle(
            seen=traffic(level=2.5), live=full, pods=pods, history=history, now=NOW + second
        )
        assert decision.desired_replicas <= 4
        history = decision.history
    assert decision.desired_replicas == 3 or decision.binding_constraint is Constraint.QUEUE


def test_pitfall_3_low_kv_with_a_long_queue_scales_up_when_slots_bind():
    room = capacity(blocks=1000, sequences=8)
    decision = settle(room=room, seen=traffic(level=2.0), live=[use(reserved=80, waiting=300)])
    assert decision.desired_replicas >= 2
    assert decision.binding_constraint is Constraint.QUEUE
    assert "sequence slots" in decision.message


def test_pitfall_4_and_37_a_full_prefix_cache_is_no_demand():
    decision = settle(live=[use(reserved=10, cached=90)])
    assert decision.desired_replicas == 1


@pytest.mark.parametrize("absent", [MISSING, STALE, NAN], ids=["missing", "stale", "nan"])
def test_pitfall_5_and_6_what_is_not_known_never_shrinks(absent):
    pods = fleet(READY, READY, READY)
    decision = settle(seen=absent, live=[absent] * 3, pods=pods)
    assert decision.desired_replicas == 3
    assert decision.binding_constraint is Constraint.SIGNAL_HOLD
    assert decision.reason is DecisionReason.HOLDING
    assert absent.reason in decision.message
    assert decision.victims == ()


def test_pitfall_6_a_hold_is_bounded_and_says_when_it_ends():
    pods, history = fleet(READY, READY), old(2)
    for second in (0, 300, 600):
        decision = settle(
            seen=STALE, live=[STALE] * 2, pods=pods, history=history, now=NOW + second
        )
        assert (decision.reason, decision.active) == (DecisionReason.HOLDING, True)
        history = decision.history
    decision = settle(seen=STALE, live=[STALE] * 2, pods=pods, history=history, now=NOW + 601)
    assert (decision.reason, decision.active) == (DecisionReason.HOLD_EXPIRED, False)
    assert decision.desired_replicas == 2


def test_pitfall_6_nothing_shrinks_on_the_first_look_after_a_long_loss():
    pods = fleet(READY, READY, READY)
    lost = replace(old(3), signals_lost_at=NOW - 120.0)
    decision = settle(pods=pods, history=lost)
    assert (decision.desired_replicas, decision.reason) == (3, DecisionReason.STABILIZING)
    later = settle(pods=pods, history=decision.history, now=NOW + 301)
    assert later.desired_replicas == 1


def test_pitfall_5_a_partial_look_may_grow_the_fleet_but_not_shrink_it():
    pods = fleet(READY, READY)
    half = traffic(level=4.0, coverage=0.5)
    grown = settle(seen=half, live=[use(reserved=90), MISSING], pods=pods)
    assert (grown.desired_replicas, grown.binding_constraint) == (4, Constraint.MEMORY)
    calm = settle(seen=traffic(level=0.1, coverage=0.5), live=[use(), MISSING], pods=pods)
    assert (calm.desired_replicas, calm.binding_constraint) == (2, Constraint.SIGNAL_HOLD)
    assert "1 of 2 replicas" in calm.message


def test_pitfall_8_no_traffic_is_a_value_and_does_not_freeze_scale_down():
    decision = settle(seen=traffic(level=0.0, lengths=None), pods=fleet(READY, READY, READY))
    assert decision.desired_replicas == 1
    assert decision.reason is not DecisionReason.HOLDING


def test_pitfall_9_a_hot_replica_is_not_averaged_away():
    pods = fleet(READY, READY, READY)
    live = [use(reserved=100, waiting=900), use(reserved=5), use(reserved=5)]
    decision = settle(seen=traffic(level=2.6), live=live, pods=pods)
    assert decision.desired_replicas == 4


def test_pitfall_10_use_is_summed_at_one_instant():
    pods = fleet(READY, READY)
    first = settle(live=[use(reserved=95), use(reserved=5)], pods=pods)
    second = settle(live=[use(reserved=5), use(reserved=95)], pods=pods, history=first.history)
    assert second.desired_replicas <= 2


def test_pitfall_14_two_to_one_waits_until_live_kv_fits_into_one():
    pods = fleet(READY, READY)
    decision = settle(seen=traffic(level=0.8), live=[use(reserved=60), use(reserved=60)], pods=pods)
    assert decision.desired_replicas == 2
    fits = settle(seen=traffic(level=0.8), live=[use(reserved=40), use(reserved=40)], pods=pods)
    assert fits.desired_replicas == 1


def test_pitfall_14_the_largest_want_of_the_window_counts():
    pods, history = fleet(READY, READY, READY), old(3)
    wanted_3 = settle(seen=traffic(level=3.0), pods=pods, history=history)
    history = wanted_3.history
    for second in (30, 150, 299):
        calm = settle(pods=pods, history=history, now=NOW + second)
        assert (calm.desired_replicas, calm.reason) == (3, DecisionReason.STABILIZING)
        history = calm.history
    done = settle(pods=pods, history=history, now=NOW + 301)
    assert (done.desired_replicas, done.victims) == (1, ("p0", "p1"))


def test_pitfall_17_shrinking_waits_for_a_rollout():
    pods = fleet(READY, READY, READY, target=2, rollout=True)
    decision = settle(pods=pods)
    assert (decision.desired_replicas, decision.reason) == (2, DecisionReason.ROLLOUT_IN_PROGRESS)
    assert decision.victims == ()


def test_pitfall_18_a_replica_that_no_node_takes_stops_further_growth():
    pods = fleet(READY, ReplicaPhase.UNSCHEDULABLE, target=2)
    decision = settle(seen=traffic(level=5.0), live=[use(reserved=90, waiting=300)], pods=pods)
    assert (decision.desired_replicas, decision.reason) == (
        2,
        DecisionReason.REPLICAS_UNSCHEDULABLE,
    )
    assert decision.binding_constraint is Constraint.BEHAVIOUR
    assert "can't be scheduled" in decision.message


def test_pitfall_18_crashing_and_terminating_replicas_are_neither_demand_nor_missing_signals():
    pods = fleet(READY, ReplicaPhase.CRASH_LOOPING, ReplicaPhase.TERMINATING, target=2)
    live = [use(reserved=10), MISSING, use(reserved=100, waiting=500)]
    decision = settle(seen=traffic(level=0.2), live=live, pods=pods)
    assert decision.desired_replicas == 1
    assert decision.victims == ("p1",)


@pytest.mark.parametrize("second", [0, 100, 299])
def test_pitfall_20_a_restart_never_shrinks_within_a_window(second):
    pods = fleet(READY, READY, READY, READY)
    decision = settle(pods=pods, history=History.fresh(NOW, 4), now=NOW + second)
    assert decision.desired_replicas == 4


def test_pitfall_22_a_gauge_capped_by_slots_still_shows_its_need():
    room = capacity(blocks=1000, sequences=4)
    decision = settle(room=room, seen=traffic(level=3.0), live=[use(reserved=40)])
    assert decision.desired_replicas >= 6


def test_pitfall_34_a_capacity_of_nothing_is_an_error_and_no_runaway():
    with pytest.raises(ValueError, match="holds nothing"):
        ReplicaCapacity(4, 4, limits(4, watermark=4))


def test_pitfall_35_the_service_rate_is_not_divided_by_replicas():
    for ready in (1, 2, 3):
        pods = fleet(*[READY] * ready)
        decision = settle(seen=traffic(level=6.0), live=[use(reserved=90)] * ready, pods=pods)
        assert decision.desired_replicas == 6


def test_pitfall_policy_8_a_queue_is_work_and_not_residents():
    pods = fleet(*[READY] * 4)
    live = [use(reserved=95, waiting=500) for _ in range(4)]
    decision = settle(seen=traffic(level=3.0), live=live, pods=pods, history=old(4))
    as_residents = (4 * 95 + 4 * 500) / 100
    assert decision.desired_replicas <= 6 < as_residents


def test_a_decision_is_a_function_of_its_arguments_and_a_label_of_no_pod_steers_it():
    pods = fleet(READY)
    occupancy = {"p0": use(reserved=10), "stranger": use(reserved=100, waiting=10_000)}
    decisions = [
        decide(SPEC, capacity(), traffic(level=0.5), occupancy, pods, old(1), NOW) for _ in range(2)
    ]
    assert decisions[0] == decisions[1]
    assert decisions[0].desired_replicas == 1


def test_a_want_is_remembered_only_while_no_later_one_covers_it():
    history = History.fresh(NOW, 5)
    for second in range(500):
        history = history.observe(NOW + second, 1 + second % 3, 300.0)
    assert len(history.wants) <= 3
    assert history.highest_want() == 3


def test_min_is_reached_at_once_when_raised():
    decision = settle(ScalingSpec(4, 9), pods=fleet(READY))
    assert (decision.desired_replicas, decision.binding_constraint) == (4, Constraint.MIN_REPLICAS)
