"""Footprint: whole blocks, monotone, shared by branches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.budget import Footprint

TOKENS = st.integers(0, 5000)


@given(TOKENS, TOKENS, st.sampled_from([1, 8, 16, 32]))
def test_holds_exactly_what_is_needed(prompt, generated, block_tokens):
    blocks = Footprint(block_tokens).blocks(prompt, generated)
    assert (blocks - 1) * block_tokens < prompt + generated <= blocks * block_tokens


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_branches_share_the_prompt(prompt, generated, branches):
    footprint = Footprint(16)
    together = footprint.blocks(prompt, generated, branches=branches)
    assert together <= branches * footprint.blocks(prompt, generated)
    assert together >= footprint.blocks(prompt, generated)
    if prompt % 16 == 0:
        assert together == prompt // 16 + branches * footprint.blocks(generated)


@given(TOKENS, TOKENS, TOKENS)
def test_speculative_tokens_take_room_like_generated_ones(prompt, generated, speculative):
    footprint = Footprint(16)
    assert footprint.blocks(prompt, generated, speculative) == footprint.blocks(
        prompt, generated + speculative
    )


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -1), (0, 0, -1), (1, 1, 0, 0)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="can't be negative"):
        Footprint(16).blocks(*arguments)
