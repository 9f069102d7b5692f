"""What a budget says of itself, and what observations teach."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.budget import (
    Observation,
    calibrate,
    largest_context,
    sequences_at,
    waste,
)
from kvscaler.budget.lines import Basis

from tests.core.budget.deployments import deployment

GIB = 1 << 30


def test_sequences_and_context_are_each_others_inverse():
    asked = deployment()
    budget = asked.budget()
    number = sequences_at(budget, 3000, 1000)
    assert number == budget.blocks // 250
    assert largest_context(budget, asked.model, number) >= 4000


def test_a_speculative_step_writes_ahead_of_the_last_token():
    budget = deployment().budget()
    assert sequences_at(budget, 1000, 600) == budget.blocks // 100
    assert sequences_at(budget, 1000, 600, speculative_tokens=3) == budget.blocks // 101


def test_waste_by_cause():
    asked = deployment("gemma-4-26b-a4b")
    lost = waste(asked, asked.budget(), tokens=1000)
    assert lost.rounding_bytes > 0
    assert lost.replication_bytes == 0


@pytest.mark.parametrize(
    ("name", "settings", "copied"),
    [
        # 4 KV heads on 8 ranks are kept twice, on 4 ranks once, whatever the pipeline's stages.
        ("qwen3-30b-a3b", {"tensor_parallel": 8}, 1 / 2),
        ("qwen3-30b-a3b", {"tensor_parallel": 4, "pipeline_parallel": 2}, 0),
        # Every rank keeps MLA's latents, unless ranks share the tokens.
        ("deepseek-v3", {"tensor_parallel": 8}, 7 / 8),
        ("deepseek-v3", {"tensor_parallel": 8, "context_parallel": 8}, 0),
    ],
)
def test_copies_of_keys_and_values(name, settings, copied):
    asked = deployment(name, card="h200", **settings)
    budget = asked.budget()
    found = waste(asked, budget, 1000).replication_bytes
    assert found == pytest.approx(copied * budget.pool_bytes, rel=0.01)


@given(st.floats(0.7, 1.3))
def test_calibration_is_idempotent_and_still_adds_up(factor):
    budget = deployment().budget()
    observation = Observation(kv_bytes=int(budget.kv_bytes * factor))
    once, learned = calibrate(budget, observation)
    assert once.kv_bytes == observation.kv_bytes
    assert once.usable_bytes == once.overhead_bytes + once.kv_bytes
    assert learned.deviation == pytest.approx(factor - 1, abs=1e-6)
    again, _ = calibrate(once, observation)
    assert again.kv_bytes == once.kv_bytes
    assert [line.bytes for line in again.lines] == [line.bytes for line in once.lines]
    assert learned.applied_to(once) == once


def test_an_observation_in_blocks_is_taken_as_it_is():
    budget = deployment().budget()
    observed, _ = calibrate(budget, Observation(blocks=20_000))
    assert observed.blocks == 20_000
    for nonsense in (Observation(), Observation(kv_bytes=-1), Observation(blocks=10**12)):
        with pytest.raises(ValueError, match="observ"):
            calibrate(budget, nonsense)


def test_siblings_learn_and_strangers_do_not():
    seen = deployment(memory_utilization_percent=90).budget()
    _, learned = calibrate(seen, Observation(kv_bytes=seen.kv_bytes - GIB // 2))
    sibling = deployment(memory_utilization_percent=80).budget()
    better = learned.applied_to(sibling)
    # The half GiB that was missing is missing at the other utilization too, within rounding.
    assert sibling.kv_bytes - better.kv_bytes == pytest.approx(GIB // 2, rel=0.01)
    assert any(line.basis is Basis.OBSERVED for line in better.lines)
    assert better.kv_high_bytes - better.kv_low_bytes < sibling.kv_high_bytes - sibling.kv_low_bytes
    for stranger in (deployment("qwen3-8b").budget(), deployment(card="a100").budget()):
        assert learned.applied_to(stranger) == stranger


def test_an_observation_that_leaves_too_little_no_longer_fits():
    asked = deployment(max_context_tokens=131_072)
    observed, _ = calibrate(asked.budget(), Observation(kv_bytes=15 * GIB))
    assert not observed.fit.fits
    assert observed.fit.shortfall_bytes == GIB
    assert calibrate(asked.budget(), Observation(kv_bytes=16 * GIB))[0].fit.fits


def test_a_context_that_nobody_stated_shrinks_with_the_observed_pool():
    observed, _ = calibrate(deployment().budget(), Observation(blocks=2000))
    assert observed.fit.fits
    assert observed.max_context_tokens == 32_000


def test_a_calibrated_deployment_corrects_its_siblings_only():
    asked = deployment()
    seen = asked.budget()
    _, learned = calibrate(seen, Observation(kv_bytes=seen.kv_bytes - GIB))
    corrected = replace(asked, calibration=learned)
    assert corrected.budget().kv_bytes == pytest.approx(seen.kv_bytes - GIB, abs=100)
    lower = corrected.changed(memory_utilization_percent=80)
    assert lower.budget().kv_bytes < deployment(memory_utilization_percent=80).budget().kv_bytes
    other = replace(deployment(card="a100"), calibration=learned)
    assert other.budget() == deployment(card="a100").budget()


@given(st.floats(0.001, 1.0), st.sampled_from(["vllm", "tgi", "sglang", "lmdeploy"]))
def test_whatever_was_observed_no_line_falls_below_zero(share, engine):
    budget = deployment("llama-3.1-70b", engine=engine).budget()
    observed, _ = calibrate(budget, Observation(kv_bytes=int(share * budget.usable_bytes)))
    assert observed.kv_bytes + observed.overhead_bytes == budget.usable_bytes
    assert all(line.bytes >= 0 for line in observed.lines)


def test_more_than_may_be_used_can_not_have_been_observed():
    budget = deployment(memory_utilization_percent=50).budget()
    with pytest.raises(ValueError, match=r"more than the 39\.59 GiB that may be used.*50%"):
        calibrate(budget, Observation(kv_bytes=40 * GIB))


def test_cells_that_are_allocated_apart_are_part_of_what_a_request_needs():
    asked = deployment("gemma-2-9b", engine="llama.cpp", max_context_tokens=8192)
    budget = asked.budget()
    assert budget.layout.fixed_bytes > 0
    assert budget.fit.needed_bytes == budget.kv_bytes
    observed, _ = calibrate(budget, Observation(kv_bytes=budget.kv_bytes - GIB // 2))
    assert not observed.fit.fits
    assert observed.fit.shortfall_bytes == GIB // 2
