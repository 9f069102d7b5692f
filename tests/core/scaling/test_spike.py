"""The whole loop against a simulated service: how fast it follows, and how quiet it stays."""

from itertools import pairwise

import pytest
from kvscaler.scaling import Constraint, History, ScalingSpec
from kvscaler.traffic import SampleHistory

from tests.core.scaling.small_fleet import SmallFleet

SPEC = ScalingSpec(min_replicas=1, max_replicas=8, stabilization_seconds=45.0)


def direction_changes(replicas: list[int]) -> int:
    steps = [b - a for a, b in pairwise(replicas) if a != b]
    return sum(1 for a, b in pairwise(steps) if (a > 0) != (b > 0))


@pytest.mark.parametrize("seed", range(4))
def test_a_spike_of_two_and_a_half_replicas_is_met_and_left_again(seed):
    service = SmallFleet(seed, SPEC)
    service.run(90.0, service.rate_for(0.15))
    assert service.target == 1
    service.run(90.0, service.rate_for(2.5))
    assert 3 <= service.target <= 5
    first_up = next(d for d in service.decisions if d.desired_replicas > 1)
    assert first_up.binding_constraint is Constraint.MEMORY
    service.run(200.0, service.rate_for(0.15))
    assert service.target == 1
    assert direction_changes([d.desired_replicas for d in service.decisions]) <= 3


def test_most_spikes_are_answered_within_6_s_of_their_first_request():
    took = []
    for seed in range(12):
        service = SmallFleet(seed, SPEC)
        service.run(90.0, service.rate_for(0.15))
        before = service.target
        for second in range(1, 31):
            service.run(1.0, service.rate_for(2.5))
            if service.target > before:
                took.append(second)
                break
    assert len(took) == 12
    assert sorted(took)[9] <= 6, took


@pytest.mark.parametrize("seed", range(6))
def test_more_is_asked_for_within_3_s_of_queue_growth(seed):
    service = SmallFleet(seed, SPEC, prompt=(40, 100), output=(30, 90))
    service.run(90.0, 0.3)
    assert service.target == 1
    queued_since = None
    for _ in range(60):
        service.run(1.0, service.rate_for(2.5))
        waiting = sum(len(r.waiting) for r in service.replicas)
        if queued_since is None and waiting >= 2:
            queued_since = service.now
        if service.target > 1:
            break
    assert service.target > 1
    assert queued_since is None or service.now - queued_since <= 3.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [0.4, 1.5])
def test_constant_load_does_not_flap(seed, load):
    service = SmallFleet(seed, ScalingSpec(1, 8), poll_seconds=2.0)
    service.run(900.0, service.rate_for(load))
    assert direction_changes([d.desired_replicas for d in service.decisions]) <= 4
    assert service.refused == 0


def test_a_restart_in_a_spike_neither_shrinks_nor_runs_away():
    service = SmallFleet(2, SPEC)
    service.run(60.0, service.rate_for(0.2))
    service.run(60.0, service.rate_for(2.5))
    before = service.target
    service.samples = SampleHistory()
    service.history = History.fresh(service.now, service.target)
    service.decisions.clear()
    service.run(44.0, service.rate_for(2.5))
    wanted = [d.desired_replicas for d in service.decisions]
    assert min(wanted) >= before
    assert max(wanted) <= before + 2
