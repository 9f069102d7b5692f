"""The least time of a decode step is what must be read, at the card's bandwidth."""

from dataclasses import replace

import pytest
from kvscaler.budget.bandwidth import decode_step_floor_seconds

from tests.core.budget.deployments import deployment

GIB = 1 << 30


def test_weights_without_the_embedding_table_and_all_keys_and_values_are_read_once():
    asked = deployment()
    budget = asked.budget()
    # Llama-3.1-8B: 128,256 x 4,096 of its parameters are looked up, not read; 1,600 tokens are 100 blocks.
    read = budget.line("weights").bytes * (1 - 128_256 * 4096 / 8_030_261_248)
    read += 10 * 100 * (2 << 20)
    expected = read / asked.accelerator.bandwidth_bytes_per_second
    assert decode_step_floor_seconds(asked, budget, 10, 1600) == pytest.approx(expected, rel=1e-6)


def test_stages_follow_one_another():
    single, staged = deployment(), deployment(pipeline_parallel=2)
    one = decode_step_floor_seconds(single, single.budget(), 1, 16)
    two = decode_step_floor_seconds(staged, staged.budget(), 1, 16)
    assert two == pytest.approx(one, rel=0.1)


def test_what_is_not_known_is_not_told():
    experts = deployment("qwen3-30b-a3b")
    assert decode_step_floor_seconds(experts, experts.budget(), 1, 16) is None
    asked = deployment()
    card = replace(asked.accelerator, bandwidth_bytes_per_second=None)
    unknown = replace(asked, accelerator=card)
    assert decode_step_floor_seconds(unknown, unknown.budget(), 1, 16) is None
