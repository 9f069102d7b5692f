"""What engines do unless told, by version and card: each case as a public log printed it.

Where a figure is given by arithmetic it stands in the test; where by a log, with its source.
"""

import pytest
from kvscaler import hardware
from kvscaler.budget import EngineSettings, compute_budget, profile_for
from kvscaler.models import ModelArchitecture, catalogue

GIB = 1 << 30
FOR_DEBUG = "shun8686/for_debug, scripts/log and logs"
LLAMA_2_7B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 11008, "vocab_size": 32000,
    "torch_dtype": "float16", "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_15_7B = LLAMA_2_7B | {"model_type": "qwen2", "vocab_size": 151936}


def budget_of(facts, card, engine, **settings):
    accelerator = hardware.find(card)
    return compute_budget(
        ModelArchitecture.from_config(facts),
        accelerator,
        profile_for(engine, accelerator),
        EngineSettings(**settings),
    )


def known(name, **facts):
    return dict(catalogue.find(name).architecture.facts) | facts


@pytest.mark.parametrize(
    ("scheme", "settings", "gib"),
    [
        # "Load weight end. ... mem usage" of DeepSeek R1 on Ascend with DeepEP, by attention replicas.
        ("int4-int8", {"tensor_parallel": 16, "data_parallel": 16}, 40.11),
        ("int4-int8", {"tensor_parallel": 16, "data_parallel": 4}, 28.94),
        ("int8", {"tensor_parallel": 32, "data_parallel": 32, "dense_parallel": 1}, 41.00),
        ("int8", {"tensor_parallel": 32, "data_parallel": 16, "dense_parallel": 1}, 33.84),
        ("int8", {"tensor_parallel": 32, "data_parallel": 8, "dense_parallel": 1}, 30.18),
    ],
)
def test_sglang_replicas_of_attention_each_hold_it(scheme, settings, gib):
    facts = known("deepseek-v3", quantization=scheme, quantization_skips="re:.*kv_b_proj.*")
    budget = budget_of(facts, "ascend-910b", "sglang", memory_utilization_percent=80,
                       expert_parallel=True, data_parallel_head=True, **settings)  # fmt: skip
    used = budget.line("weights").bytes + budget.line("loading").bytes
    assert used / GIB == pytest.approx(gib, rel=0.03), FOR_DEBUG
    loading = budget.line("loading")
    assert used <= gib * GIB <= used + loading.high_bytes - loading.bytes + 0.02 * gib * GIB


def test_dividing_attention_by_hand():
    facts = known("deepseek-v3", quantization="int8")
    common = {"memory_utilization_percent": 80, "tensor_parallel": 32}

    def weights(**settings):
        return budget_of(facts, "h200", "sglang", **common, **settings).line("weights").bytes

    plain = weights()
    # With 32 replicas each rank holds all of attention that is else divided: queries 1536 x 128 x 192 and
    # outputs 128 x 128 x 7168 in 8 bits, the expansion 512 x 128 x 256 in 8 and in 16 bits, and the
    # embeddings, 129,280 x 7168 in 16 bits.
    divided = 61 * (1536 * 128 * 192 + 128 * 128 * 7168 + 3 * 512 * 128 * 256)
    embeddings = 129_280 * 7168 * 2
    more = (divided + embeddings) * 31 / 32
    assert weights(data_parallel=32) - plain == pytest.approx(more, rel=0.001)
    # A head of its own: as much again as the embeddings.
    head = weights(data_parallel=32, data_parallel_head=True) - weights(data_parallel=32)
    assert head == pytest.approx(embeddings * 31 / 32, rel=0.001)
    # Where tokens travel, the shared expert of each of 58 layers is on every rank: 3 x 7168 x 2048.
    shared = weights(expert_parallel=True) - plain
    assert shared == pytest.approx(58 * 3 * 7168 * 2048 * 31 / 32, rel=0.001)
    # The three dense layers, 3 x 7168 x 18,432 each, undivided.
    dense = weights(dense_parallel=1) - plain
    assert dense == pytest.approx(3 * 3 * 7168 * 18432 * 31 / 32, rel=0.001)


def test_weights_in_the_hosts_memory_make_room():
    facts = known("llama-3.1-70b")
    refused = budget_of(facts, "h100", "vllm@0.20.0", tensor_parallel=1)
    kept = budget_of(facts, "h100", "vllm@0.20.0", tensor_parallel=1, weight_offload_bytes=80 * GIB)
    assert not refused.fit.fits
    assert kept.fit.fits
    assert kept.kv_bytes - refused.kv_bytes == 80 * GIB
    assert "80.00 GiB in the host's memory" in kept.line("weights").note
    all_of_it = budget_of(facts, "h100", "vllm@0.20.0", weight_offload_bytes=900 * GIB)
    assert all_of_it.line("weights").bytes == 0


@pytest.mark.parametrize(
    ("version", "max_batch"),
    [("0.5.0", 8), ("0.9.0", 1), ("0.11.0", 256), ("0.13.0", 256), ("0.14.0", 2048)],
)
def test_tensorrt_llm_builds_for_as_many_sequences_as_its_release_notes_say(version, max_batch):
    card = hardware.find("a100-80gb")
    profile = profile_for(f"tensorrt-llm@{version}", card)
    model = ModelArchitecture.from_config(QWEN_15_7B)
    assert profile.resolve(model, card, EngineSettings()).max_sequences == max_batch
    budget = budget_of(QWEN_15_7B, "a100-80gb", f"tensorrt-llm@{version}")
    # 28.5 bytes a logit: 2.66 and 5.76 GB at 2,048 x 151,936 (TensorRT-LLM issue 1188).
    buffers = budget.line("buffers").bytes
    assert buffers == int(28.5 * max_batch * 151_936)
    if max_batch == 2048:
        assert buffers == pytest.approx(2.66e9 + 5.76e9, rel=0.06)


def test_tensorrt_llm_leaves_what_its_logs_say():
    # 631 blocks of 64 tokens with the defaults of 0.13 on an A100 of 40 GB (TensorRT-LLM issue 2268).
    defaults = budget_of(QWEN_15_7B, "a100-40gb", "tensorrt-llm@0.13.0")
    assert defaults.block_bytes == 64 * 2 * 32 * 4096 * 2
    assert defaults.blocks == pytest.approx(631, rel=0.01)
    # 10,718 tokens with --max_batch_size 25 on an A10, 25 x 1,024 tokens at once (issue 224).
    stated = budget_of(LLAMA_2_7B, "a10", "tensorrt-llm@0.5.0", max_sequences=25,
                       memory_utilization_percent=95)  # fmt: skip
    assert stated.step_tokens == 25 * 1024
    assert stated.kv_bytes / (2 * 32 * 4096 * 2) == pytest.approx(10_718, rel=0.02)


def test_mxfp4_experts_run_on_marlin_until_wheels_bring_triton():
    # 65.97 GiB of weights with Marlin, 1.71 GiB of KV (vLLM issues 23278, 27508); 64.38 with Triton
    # (llm-d-planner, docs/empirical-vllm-memory-results.md; issue 33155).
    asked = {"memory_utilization_percent": 95, "step_tokens": 1024}
    before = budget_of(known("gpt-oss-120b"), "h100", "vllm@0.11.0", **asked)
    assert before.line("weights").bytes / GIB == pytest.approx(65.97, rel=0.002)
    assert before.kv_bytes / GIB == pytest.approx(1.71, abs=0.05)
    assert not before.fit.fits or before.max_context_tokens < 131_072
    after = budget_of(known("gpt-oss-120b"), "h100", "vllm@0.14.1", **asked)
    assert after.line("weights").bytes / GIB == pytest.approx(64.38, rel=0.004)


def test_experts_keep_their_workspace_beside_any_pass():
    # Qwen3 30B on an H200 at 0.5: 6.71 GiB of KV (Telco-RAG, vllm_8000.log, vLLM 0.15.0).
    facts = known("qwen3-30b-a3b")
    asked = {"memory_utilization_percent": 50, "step_tokens": 8192}
    kept = budget_of(facts, "h200", "vllm@0.15.0", **asked)
    assert kept.kv_bytes / GIB == pytest.approx(6.71, rel=0.01)
    freed = budget_of(facts, "h200", "vllm@0.14.0", **asked)
    # Two buffers of 8,192 tokens x 8 experts x 2,048 in 16 bits.
    assert freed.kv_bytes - kept.kv_bytes == pytest.approx(2 * 8192 * 8 * 2048 * 2, abs=2)


@pytest.mark.parametrize(
    ("name", "settings", "gib"),
    [
        # "Estimated CUDA graph memory" of vLLM 0.22 to 0.27: mlops-assignment, DiscoverPhysicsWIP,
        # jupiter-glm52-vllm-worklog and dgx-spark-local-llm.
        ("qwen3-30b-a3b", {"max_sequences": 64}, 0.14),
        ("qwen3.5-27b", {"max_sequences": 256}, 0.96),
        ("deepseek-v3", {"max_sequences": 1}, 0.06),
        ("qwen3.5-35b-a3b", {"max_sequences": 32, "speculative_tokens": 3}, 0.74),
    ],
)
def test_graphs_grow_with_batch_sizes_and_layers(name, settings, gib):
    line = budget_of(known(name), "h200", "vllm@0.25.0", **settings).line("cuda graphs")
    assert line.low_bytes * 0.95 <= gib * GIB <= line.high_bytes * 1.1
    one_stage = budget_of(known(name), "h200", "vllm@0.25.0", pipeline_parallel=2, **settings)
    assert one_stage.line("cuda graphs").bytes < line.bytes


@pytest.mark.parametrize(
    ("facts", "card", "engine", "settings", "half_width"),
    [
        # Everything stated and known: the sampler's constant and the driver's total remain.
        (known("llama-3.1-8b"), "h100", "vllm@0.11.0", {}, 0.01),
        (known("qwen3-32b"), "h100", "vllm@0.11.0", {"tensor_parallel": 2}, 0.03),
        # Unified memory shares with the host; what a scheme leaves in 16 bits is not stated.
        (known("qwen3.5-35b-a3b", quantization="nvfp4"), "gb10", "vllm@0.25.0", {}, 0.04),
    ],
)
def test_intervals_are_narrow_where_inputs_are_known(facts, card, engine, settings, half_width):
    budget = budget_of(facts, card, engine, **settings)
    assert (budget.kv_high_bytes - budget.kv_low_bytes) / 2 < half_width * budget.kv_bytes


def test_intervals_widen_with_what_is_not_known():
    def width(facts, card, **settings):
        budget = budget_of(facts, card, "vllm@0.20.0", **settings)
        return budget.kv_high_bytes - budget.kv_low_bytes

    plain, latent = known("qwen3-32b"), known("qwen3.5-27b")
    assert width(plain | {"quantization": "fp8"}, "h100") < width(
        latent | {"quantization": "fp8"}, "h100"
    )
    listed = latent | {"quantization": "fp8", "quantization_skips": "re:.*linear_attn.*"}
    assert width(listed, "h100") < width(latent | {"quantization": "fp8"}, "h100")
    assert width(plain, "h100") < width(plain, "h100", tensor_parallel=4)
    assert width(plain, "h100") < width(plain, "gb10")
