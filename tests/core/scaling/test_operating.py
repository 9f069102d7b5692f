"""Fleets are sized by what requests hold on a full replica, not by what they held in a calm."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.performance import StepTimeModel
from kvscaler.scaling import Constraint, ScalingSpec
from kvscaler.scaling.operating import (
    ROOM_SIGMAS,
    lengths_when_full,
    request_work,
    share_per_replica,
)
from kvscaler.traffic.lengths import length_statistics

from tests.core.scaling.situations import LENGTHS, capacity, settle, traffic
from tests.core.scaling.stepping_fleet import CALM, COSTS, SPIKE, SteppingFleet

SPEC = ScalingSpec(1, 8)
SEEN = replace(LENGTHS, time_per_output_token_seconds=0.3)
MODELS = st.builds(
    StepTimeModel,
    st.floats(1e-4, 0.5),
    st.floats(0, 0.05),
    st.floats(0, 1e-5),
    st.floats(0, 0.01),
    st.just("drawn"),
)


def measured(rate: float, seconds: float = 1200.0):
    """Lengths as one replica measures them at a rate."""
    service = SteppingFleet(1, ScalingSpec(1, 1))
    service.run(seconds, rate)
    counters = service.replicas[0].sample(service.now).counters
    found = length_statistics(counters, service.replicas[0].sample(service.now).in_flight)
    return found, service.replicas[0].busy_block_seconds / seconds


def test_a_full_replica_is_foretold_from_a_calm_one():
    calm, _ = measured(CALM)
    full, in_use = measured(0.85)
    share = share_per_replica(33, calm.block_squared_seconds / calm.block_seconds, ROOM_SIGMAS)
    foretold = lengths_when_full(calm, COSTS, 33).block_seconds
    assert in_use == pytest.approx(share, rel=0.1)
    assert full.block_seconds > 1.6 * calm.block_seconds
    assert foretold == pytest.approx(full.block_seconds, rel=0.15)


def test_the_load_under_which_was_measured_hardly_matters():
    found = [
        lengths_when_full(measured(rate)[0], COSTS, 33).block_seconds for rate in (0.2, 0.4, 0.6)
    ]
    assert max(found) / min(found) < 1.25


def test_without_step_times_or_token_times_lengths_stay_as_measured():
    assert lengths_when_full(SEEN, None, 100) is SEEN
    assert lengths_when_full(LENGTHS, COSTS, 100) is LENGTHS


def test_step_costs_far_too_small_do_not_shrink_what_was_measured_below_a_full_pool():
    nothing = StepTimeModel(1e-6, 1e-9, 0.0, 1e-9, "wrong")
    found = lengths_when_full(SEEN, nothing, 100)
    share = share_per_replica(100, 10.0, ROOM_SIGMAS)
    assert found.block_seconds == pytest.approx(SEEN.block_seconds * share / 100)


@given(MODELS, st.integers(20, 5000), st.floats(1e-3, 2.0))
def test_a_rate_that_fills_a_share_solves_the_steady_state(model, usable, tpot):
    seen = replace(LENGTHS, time_per_output_token_seconds=tpot)
    work = request_work(seen)
    share = share_per_replica(usable, 10.0, ROOM_SIGMAS)
    full = lengths_when_full(seen, model, usable)
    assert full.block_squared_seconds / full.block_seconds == pytest.approx(10.0)
    assert full.block_seconds >= seen.block_seconds * share / usable * (1 - 1e-9)
    rate = share / full.block_seconds
    busy = rate * model.work_seconds(work)
    alone = seen.block_seconds * min(1.0, model.time_alone_per_token_seconds(work) / tpot)
    if full.block_seconds > seen.block_seconds * share / usable * (1 + 1e-9):
        assert busy < 1.0
        assert full.block_seconds == pytest.approx(alone / (1.0 - busy), rel=1e-6)


@given(MODELS, st.floats(0, 20), st.floats(1, 4), st.integers(20, 2000))
def test_more_arrivals_need_more_and_more_blocks_need_less(model, rate, factor, usable):
    def need(per_second: float, blocks: int) -> float:
        room = capacity(blocks=blocks, step_time=model)
        found = settle(room=room, seen=traffic(level=per_second, lengths=SEEN))
        return next(c.needed for c in found.candidates if c.constraint is Constraint.MEMORY)

    grown = [need(rate * x, usable) for x in (1.0, factor)]
    assert grown[0] <= grown[1] + 1e-9
    assert need(rate, 2 * usable) <= grown[0] + 1e-9


def test_the_message_says_what_was_measured_and_what_is_planned_with():
    room = capacity(blocks=33, step_time=COSTS)
    decision = settle(room=room, seen=traffic(level=2.0, lengths=SEEN))
    assert "blocks·s (on a full replica; 80.0 measured, 0 s old)" in decision.message


@pytest.fixture(scope="module")
def spikes() -> list[tuple[SteppingFleet, float]]:
    """Calm for a minute, then a spike of 90 s, with many draws; each with the spike's begin."""
    found = []
    for seed in range(16):
        service = SteppingFleet(seed, SPEC)
        service.run(60.0, CALM)
        assert service.target == 1
        found.append((service, service.now))
        service.run(90.0, SPIKE)
    return found


def test_a_spike_is_answered_within_4_s_and_in_full_within_13_s_in_the_median(spikes):
    first = sorted(service.asked_at_least(2, spike) for service, spike in spikes)
    third = sorted(service.asked_at_least(3, spike) for service, spike in spikes)
    assert first[8] <= 4.0
    assert third[8] <= 13.0
    assert (first[-1], third[-1]) <= (15.0, 45.0)


def test_a_spike_of_three_replicas_is_not_overshot(spikes):
    highest = [max(d.desired_replicas for d in service.decisions) for service, _ in spikes]
    calm, _ = measured(CALM)
    full = lengths_when_full(calm, COSTS, 33)
    share = share_per_replica(33, full.block_squared_seconds / full.block_seconds, ROOM_SIGMAS)
    need = SPIKE * full.block_seconds / share
    assert 2.5 < need <= 3.0
    # One draw in thirty brings half as many more within 12 s and is taken at its word.
    assert sum(1 for replicas in highest if replicas > math.ceil(need) + 1) <= 1
    assert max(highest) <= math.ceil(need) + 2


def test_memory_binds_and_not_compute_where_blocks_run_out_first(spikes):
    for service, _ in spikes:
        grown = [
            b for a, b in pairwise(service.decisions) if b.desired_replicas > a.desired_replicas
        ]
        assert {d.binding_constraint for d in grown} <= {Constraint.MEMORY, Constraint.QUEUE}
        assert Constraint.MEMORY in {d.binding_constraint for d in grown}


def test_arrivals_that_prove_three_replicas_ask_for_three_at_once():
    room = capacity(blocks=33, step_time=COSTS)
    seen = replace(SEEN, block_seconds=20.0, block_squared_seconds=72.0, prompt_mean_tokens=40.0)
    seen = replace(seen, prompt_second_moment=1650.0, output_mean_tokens=18.0)
    seen = replace(seen, output_second_moment=340.0, prompt_output_mean=720.0)
    decision = settle(room=room, seen=traffic(level=0.29, short=2.08, lengths=seen))
    assert decision.binding_constraint is Constraint.MEMORY
    assert decision.desired_replicas == 3


def test_a_burst_that_has_passed_keeps_no_replicas_beyond_the_window():
    service = SteppingFleet(3, ScalingSpec(1, 8, stabilization_seconds=30.0))
    service.run(60.0, CALM)
    service.run(4.0, 6.0)
    burst = service.now
    service.run(25.0, CALM)
    assert service.target > 1
    service.run(90.0, CALM)
    assert service.target == 1
    # The level of 45 s holds the burst at first, and so does the queue that it left.
    last = max(d.time for d in service.decisions if d.desired_replicas > 1)
    assert last - burst <= 30.0 + 45.0


def test_a_fleet_is_sized_by_its_mean_replica_and_objectives_by_its_slowest():
    """One that has just started, beside others that start, has timed its steps too slow."""
    slow = StepTimeModel(
        *(3 * seconds for seconds in (
            COSTS.base_seconds, COSTS.per_sequence_seconds,
            COSTS.per_context_token_seconds, COSTS.per_prefill_token_seconds,
        )),
        "just started",
    )  # fmt: skip
    alone = capacity(blocks=33, step_time=COSTS)
    mixed = replace(alone, value=replace(alone.value, step_times=(COSTS, COSTS, slow, COSTS)))
    assert mixed.value.slowest_step_time == slow
    mean = mixed.value.mean_step_time
    assert mean is not None
    assert mean.base_seconds == pytest.approx(1.5 * COSTS.base_seconds)
    assert mean.pair_seconds == pytest.approx(1.5 * COSTS.pair_seconds)

    def held(room):
        found = settle(room=room, seen=traffic(level=0.5, lengths=SEEN))
        return next(
            i.value for c in found.candidates if c.constraint is Constraint.MEMORY
            for i in c.inputs if i.name == "kvPerRequest"
        )  # fmt: skip

    only_slow = replace(alone, value=replace(alone.value, step_times=(slow,)))
    assert held(alone) < held(mixed) < held(only_slow)
    assert held(mixed) == pytest.approx(lengths_when_full(SEEN, mean, 33).block_seconds)
