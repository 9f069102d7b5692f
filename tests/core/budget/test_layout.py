"""Blocks, groups and footprints: worked examples by architecture kind, and properties of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler import hardware
from kvscaler.budget import EngineSettings, Footprint, PoolLayout, profile_for
from kvscaler.models import LayerKind, catalogue

GIB = 1 << 30
H100 = hardware.find("h100")


def layout(name, engine="vllm@0.20.0", **settings):
    model = catalogue.find(name).architecture
    profile = profile_for(engine, H100)
    return profile.layout(model, profile.resolve(model, H100, EngineSettings(**settings)))


def test_grouped_query_attention_is_one_table():
    pool = layout("llama-3.1-8b")
    assert pool.block_bytes == 2 * 32 * 8 * 128 * 2 * 16
    assert [(g.kind, g.layers, g.block_tokens) for g in pool.groups] == [(LayerKind.FULL, 32, 16)]
    assert pool.sequence_blocks(1000) == 63


def test_heads_replicate_beyond_their_number():
    per_rank = {tp: layout("qwen3-30b-a3b", tensor_parallel=tp).block_bytes for tp in (1, 2, 4, 8)}
    assert per_rank[1] == 2 * per_rank[2] == 4 * per_rank[4]
    assert per_rank[8] == per_rank[4]  # 4 KV heads on 8 ranks


def test_windows_beside_full_layers_share_pages():
    # gpt-oss-20b: 12 full and 12 windowed layers, pages of 16 tokens x 8 heads x 64 x 2 x 2 B.
    pool = layout("gpt-oss-20b", step_tokens=2048)
    assert pool.block_bytes == 12 * 16 * 8 * 64 * 2 * 2
    full, window = pool.groups
    assert full.blocks(8192, 2048) == 512
    assert window.blocks(8192, 2048) == -(-(127 + 2048) // 16) + 1 == 137
    assert window.blocks(100, 2048) == -(-100 // 16) + 1


def test_groups_are_as_small_as_the_rarest_kind():
    # Gemma 4 26B: 5 full layers of 2 x 512 and 25 windowed ones of 8 x 256: 6 groups of 5 layers, and
    # a full block holds twice the tokens so that both pages have 131,072 bytes.
    pool = layout("gemma-4-26b-a4b")
    assert len(pool.groups) == 6
    assert pool.block_bytes == 5 * 131_072
    assert sorted({g.block_tokens for g in pool.groups}) == [16, 32]


def test_attention_blocks_grow_to_the_size_of_a_state():
    # Qwen 3.6 35B: a state of 8192 x 3 x 2 + 32 x 128 x 128 x 4 B needs 1,048 tokens of 2,048 B, which
    # is 66 blocks of 16: "Setting attention block size to 1056 tokens" (dgx-spark-benchmarks).
    pool = layout("qwen3.5-35b-a3b")
    assert pool.block_tokens == 1056
    assert [g.kind.value for g in pool.groups] == ["full"] + ["recurrent"] * 3
    assert pool.block_bytes == 10 * 1056 * 2048
    assert pool.sequence_blocks(1) == 1 + 3 * 1
    drafting = layout("qwen3.5-35b-a3b", speculative_tokens=3, draft_layers=1)
    assert drafting.block_tokens == 1072
    assert drafting.groups[0].layers == 11
    assert drafting.sequence_blocks(1) == 1 + 3 * 4


def test_latent_blocks_grow_to_the_size_of_a_state_too():
    # Kimi Linear: 7 latent and 20 recurrent layers, so groups of 7; a state of 36,864 x 2 + 524,288 x 4 B
    # takes 1,885 tokens of 1,152 B, which are 30 blocks of 64.
    pool = layout("kimi-linear-48b-a3b")
    assert [(g.kind.value, g.layers) for g in pool.groups] == [
        ("mla", 7), ("recurrent", 7), ("recurrent", 7), ("recurrent", 6),
    ]  # fmt: skip
    assert pool.block_tokens == 30 * 64
    assert pool.block_bytes == 7 * 30 * 64 * 1152
    assert pool.sequence_blocks(1_000_000) == -(-1_000_000 // 1920) + 3


def test_latent_attention_ignores_ranks_but_not_context_parallelism():
    plain, ranks = layout("kimi-k2"), layout("kimi-k2", tensor_parallel=8)
    assert plain.block_bytes == ranks.block_bytes == 61 * 576 * 2 * 64
    shared = layout("kimi-k2", tensor_parallel=8, context_parallel=8)
    assert shared.block_tokens == 8 * plain.block_tokens


def test_older_versions_keep_every_token_of_every_layer():
    old = layout("gemma-2-9b", "vllm@0.6.0", step_tokens=2048)
    new = layout("gemma-2-9b", step_tokens=2048)
    assert len(old.groups) == 1
    assert old.sequence_blocks(8192) * old.block_bytes > new.sequence_blocks(8192) * new.block_bytes
    assert len(layout("llama-4-scout", "vllm@0.8.3").groups) == 1
    assert len(layout("llama-4-scout", "vllm@0.20.0").groups) == 4


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_head"),
    [
        ("bf16", 256), ("fp8", 128), ("int8_per_token_head", 132), ("fp8_per_token_head", 132),
        ("nvfp4", 72), ("q8_0", 136), ("q4_0", 72),
    ],
)  # fmt: skip
def test_formats_of_the_cache_with_their_scales(kv_dtype, bytes_per_head):
    assert layout("llama-3.1-8b", kv_dtype=kv_dtype).block_bytes == 2 * 32 * 8 * bytes_per_head * 16


def test_llama_cpp_gives_windows_a_few_cells_of_their_own():
    model = catalogue.find("gpt-oss-20b").architecture
    profile = profile_for("llama.cpp", H100)
    resolved = profile.resolve(model, H100, EngineSettings(max_context_tokens=32768))
    pool = profile.layout(model, resolved)
    assert pool.block_bytes == 12 * 2 * 8 * 64 * 2
    assert pool.fixed_bytes == pool.block_bytes * 768  # 128 + 512 cells, padded to 256
    assert resolved.kv_cache_bytes == 32768 * pool.block_bytes + pool.fixed_bytes


MODELS = [entry.name for entry in catalogue.entries()]
ENGINES = ["vllm@0.20.0", "vllm@0.6.0", "sglang", "tensorrtllm", "lmdeploy", "tgi", "llama.cpp"]


@given(
    name=st.sampled_from(MODELS),
    engine=st.sampled_from(ENGINES),
    tokens=st.integers(1, 100_000),
    more=st.integers(0, 50_000),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_footprints_are_monotone_and_round_by_less_than_a_block_a_group(
    name, engine, tokens, more, ranks
):
    pool = layout(name, engine, tensor_parallel=ranks)
    held = pool.sequence_blocks(tokens)
    assert pool.sequence_blocks(tokens + more) >= held
    for group in pool.groups:
        if group.kind in (LayerKind.FULL, LayerKind.MLA):
            assert 0 <= group.blocks(tokens, 1) * group.block_tokens - tokens < group.block_tokens
    assert pool.longest(held, tokens + more) >= tokens
    assert pool.block_bytes <= layout(name, engine, tensor_parallel=max(1, ranks // 2)).block_bytes


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 4))
def test_branches_share_the_prompt_but_neither_windows_nor_states(prompt, generated, branches):
    pool = layout("qwen3.5-35b-a3b")
    footprint = Footprint(pool.block_tokens, pool)
    together = footprint.blocks(prompt, generated, branches=branches)
    assert footprint.blocks(prompt, generated) <= together
    assert together <= branches * footprint.blocks(prompt, generated)
    if prompt + generated:
        assert together >= branches * 3  # one state in each of three groups


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 4))
def test_a_uniform_layout_counts_like_no_layout(prompt, generated, branches):
    pool = PoolLayout.uniform(32, 16, 1 << 20)
    assert Footprint(16, pool).blocks(prompt, generated, branches=branches) == Footprint(16).blocks(
        prompt, generated, branches=branches
    )
