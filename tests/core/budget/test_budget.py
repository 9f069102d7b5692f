"""The budget adds up, agrees with what engines printed, and says what would fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler import hardware
from kvscaler.budget import (
    AdmissionPolicy,
    BudgetUnknown,
    EngineSettings,
    UnknownEngine,
    admission_limits,
    compute_budget,
    profile_for,
)
from kvscaler.models import ModelNotUnderstood, catalogue
from kvscaler.protocol.limits import ChargePolicy

GIB = 1 << 30
LLAMA = catalogue.find("llama-3.1-8b").architecture
SMOL = catalogue.find("smollm2-135m").architecture
H100 = hardware.find("h100")


def cpu_budget(memory_bytes, **settings):
    cpu = hardware.find("cpu").with_memory(memory_bytes)
    return compute_budget(SMOL, cpu, profile_for("Kvscaler", cpu), EngineSettings(**settings))


def test_vllm_on_h100_within_a_percent_of_the_published_start_up_log():
    # Llama-3.1-8B-Instruct, vLLM 0.11-0.13, utilization 0.9: weights 14.99, activation peak 4.76,
    # non-torch 0.13, KV 51.38 GiB (llm-d-planner, docs/empirical-vllm-memory-results.md).
    budget = compute_budget(
        LLAMA,
        H100,
        profile_for("vllm@0.11.0", H100),
        EngineSettings(memory_utilization_percent=90, max_context_tokens=16000),
    )
    assert budget.kv_bytes / GIB == pytest.approx(51.38, rel=0.01)
    assert budget.line("activations").bytes / GIB == pytest.approx(4.76, rel=0.01)
    assert budget.max_sequences == 1024


@given(st.integers(1, 64 * GIB), st.integers(1, 100), st.sampled_from(["Kvscaler", "VLLM"]))
def test_lines_and_pool_never_exceed_what_is_usable(memory_bytes, percent, engine):
    card = hardware.custom(memory_bytes)
    budget = compute_budget(
        SMOL, card, profile_for(engine, card), EngineSettings(memory_utilization_percent=percent)
    )
    assert budget.usable_bytes == budget.overhead_bytes + budget.kv_bytes
    assert budget.pool_bytes <= max(0, budget.kv_bytes) < budget.pool_bytes + budget.block_bytes
    assert budget.fit.fits == (budget.blocks * budget.block_tokens >= 256)
    assert all(line.low_bytes <= line.bytes <= line.high_bytes for line in budget.lines)


@given(st.integers(2 * GIB, 16 * GIB), st.integers(0, 4 * GIB))
def test_more_memory_never_means_fewer_blocks(memory_bytes, more_bytes):
    assert cpu_budget(memory_bytes + more_bytes).blocks >= cpu_budget(memory_bytes).blocks


def test_what_does_not_fit_says_by_how_much_and_what_would():
    budget = cpu_budget(1 * GIB, max_context_tokens=2048)
    assert not budget.fit.fits
    assert budget.blocks == 0
    assert "does not fit by" in budget.fit.message
    assert "GiB" in budget.fit.message
    needed = budget.overhead_bytes + 128 * budget.block_bytes
    assert budget.fit.shortfall_bytes == needed - budget.usable_bytes
    cured = cpu_budget(-(-needed * 100 // 90) + 1, max_context_tokens=2048)
    assert cured.fit.fits


def test_a_shorter_context_is_named_when_it_would_fit():
    full = cpu_budget(2 * GIB, max_context_tokens=8192)
    small_memory = int(1.45 * GIB)
    tight = cpu_budget(small_memory, max_context_tokens=8192)
    assert full.fit.fits
    assert not tight.fit.fits
    assert f"maxContextTokens {tight.pool_tokens}" in tight.fit.message
    assert cpu_budget(small_memory, max_context_tokens=tight.pool_tokens).fit.fits


def test_without_a_stated_context_the_pool_decides():
    small = cpu_budget(int(1.45 * GIB))
    assert small.max_context_tokens == small.pool_tokens < SMOL.max_context_tokens
    assert cpu_budget(8 * GIB).max_context_tokens == SMOL.max_context_tokens


def test_memory_that_nobody_stated_is_an_error_not_zero():
    cpu = hardware.find("cpu")
    with pytest.raises(BudgetUnknown, match=r"'cpu' has no memory of its own.*memory limit"):
        compute_budget(SMOL, cpu, profile_for("Kvscaler", cpu))


def test_engines_without_a_profile_are_refused_by_name():
    with pytest.raises(UnknownEngine, match="'Abacus'"):
        profile_for("Abacus", H100)


def test_limits_follow_from_the_budget_and_from_calibration():
    budget = cpu_budget(2 * GIB, max_context_tokens=2048)
    policy = AdmissionPolicy(charge=ChargePolicy.WORST_CASE, queue_requests=7, max_wait_seconds=3)
    limits = admission_limits(budget, policy)
    assert limits.kv_blocks == budget.blocks
    assert limits.max_request_tokens == 2048
    assert limits.queue_requests == 7
    assert limits.watermark_blocks == -(-budget.blocks * 5 // 100)
    calibrated = admission_limits(budget, policy, calibrated_blocks=50)
    assert calibrated.kv_blocks == 50
    assert calibrated.max_request_tokens == 800
    assert calibrated.max_sequences == 50
    assert calibrated.content_hash != limits.content_hash


def test_no_limits_without_a_block():
    with pytest.raises(ValueError, match="does not fit"):
        admission_limits(cpu_budget(1 * GIB), AdmissionPolicy())


MODELS = ["llama-3.1-8b", "gpt-oss-20b", "qwen3.5-27b", "gemma-4-26b-a4b", "deepseek-v3.2"]
ENGINES = ["vllm", "vllm@0.11.0", "vllm@0.6.0", "sglang", "tensorrtllm", "lmdeploy", "tgi"]


@given(
    name=st.sampled_from(MODELS),
    engine=st.sampled_from(ENGINES),
    memory_bytes=st.integers(8 * GIB, 300 * GIB),
    more_bytes=st.integers(0, 64 * GIB),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_any_plan_adds_up_to_the_device_and_more_memory_holds_no_less(
    name, engine, memory_bytes, more_bytes, ranks
):
    model = catalogue.find(name).architecture
    asked = EngineSettings(
        tensor_parallel=ranks, max_sequences=64, step_tokens=2048, memory_utilization_percent=90
    )
    card = hardware.custom(memory_bytes)
    plan = compute_budget(model, card, profile_for(engine, card), asked)
    assert plan.overhead_bytes + plan.kv_bytes + plan.unused_bytes == memory_bytes
    assert all(0 <= line.low_bytes <= line.bytes <= line.high_bytes for line in plan.lines)
    assert plan.kv_low_bytes <= plan.kv_bytes <= plan.kv_high_bytes
    larger = hardware.custom(memory_bytes + more_bytes)
    assert compute_budget(model, larger, profile_for(engine, larger), asked).blocks >= plan.blocks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"pipeline_parallel": -1}, "pipeline_parallel is -1"),
        ({"max_context_tokens": 1 << 70}, "max_context_tokens is"),
        ({"block_tokens": "16"}, "block_tokens is '16'"),
        ({"max_sequences": True}, "max_sequences is True"),
        ({"memory_utilization_percent": float("nan")}, "memory_utilization_percent is nan"),
        ({"memory_utilization_percent": 0}, "memory_utilization_percent is 0"),
        ({"memory_utilization_percent": 101}, "memory_utilization_percent is 101"),
        ({"weight_offload_bytes": -1}, "weight_offload_bytes is -1"),
        ({"dense_parallel": 0}, "dense_parallel is 0"),
    ],
)
def test_nonsense_settings_are_named(settings, words):
    with pytest.raises(BudgetUnknown, match=words):
        compute_budget(LLAMA, H100, profile_for("vllm", H100), EngineSettings(**settings))


@pytest.mark.parametrize("engine", [*ENGINES, "llama.cpp", "Kvscaler"])
@pytest.mark.parametrize("memory", [0, -1, -(10**18), float("nan"), "80GiB", True, 1.5e9, 1 << 70])
def test_nonsense_memory_is_named(engine, memory):
    card = hardware.custom(memory)
    with pytest.raises(BudgetUnknown, match="the memory of accelerator 'custom' is"):
        compute_budget(LLAMA, card, profile_for(engine, card))


@pytest.mark.parametrize("engine", [*ENGINES, "llama.cpp", "Kvscaler"])
def test_a_card_too_small_for_the_weights_says_so(engine):
    card = hardware.custom(8 * GIB)
    budget = compute_budget(LLAMA, card, profile_for(engine, card))
    assert not budget.fit.fits
    assert budget.usable_bytes <= 8 * GIB or budget.fit.shortfall_bytes > 0
    missing = budget.overhead_bytes + budget.fit.needed_bytes - 8 * GIB
    assert budget.fit.shortfall_bytes >= missing > 0


@pytest.mark.parametrize("engine", ["Kvscaler", "kvscaler"])
def test_our_engine_refuses_layers_that_it_does_not_compute(engine):
    model = catalogue.find("gpt-oss-20b").architecture
    with pytest.raises(ModelNotUnderstood, match="kind full, sliding: serve it with another"):
        compute_budget(model, H100, profile_for(engine, H100), EngineSettings())


def test_a_pool_given_outright_is_taken_as_it_is():
    asked = EngineSettings(kv_cache_bytes=10 * GIB)
    budget = compute_budget(LLAMA, H100, profile_for("vllm", H100), asked)
    assert budget.kv_bytes == budget.kv_low_bytes == budget.kv_high_bytes == 10 * GIB
    assert budget.blocks == 10 * GIB // budget.block_bytes
    too_large = EngineSettings(kv_cache_bytes=70 * GIB)
    refused = compute_budget(LLAMA, H100, profile_for("vllm", H100), too_large)
    assert not refused.fit.fits
    assert "more than the 79.18 GiB" in refused.fit.message


def test_adapters_are_a_line():
    asked = EngineSettings(adapters=4, adapter_rank=16)
    budget = compute_budget(LLAMA, H100, profile_for("vllm", H100), asked)
    # Per layer and adapter 16 x (4096 + 4096 + 4096 + 2048 + 4096 + 4096 + 3 x (4096 + 14336)) x 2 B.
    widths = 4096 + 4096 + 4096 + 2048 + 4096 + 4096 + 3 * (4096 + 14336)
    assert budget.line("adapters").bytes == 4 * 16 * widths * 32 * 2


@pytest.mark.parametrize("version", ["zero", "v"])
def test_an_engine_version_without_a_number_is_refused(version):
    with pytest.raises(UnknownEngine, match="holds no number"):
        profile_for(f"vllm@{version}", H100)
