"""The budget against public start-up logs: figures as printed, each with its source.

The whole collection is measured by `bench/kv_truth.py`; here stand a few rows of each engine, so that a
change that moves them shows.
"""

import pytest
from kvscaler import hardware
from kvscaler.budget import EngineSettings, compute_budget, profile_for
from kvscaler.models import ModelArchitecture, catalogue

GIB = 1 << 30
PLANNER = "llm-d-planner, docs/empirical-vllm-memory-results.md"
SPARK = "dgx-spark-benchmarks, results/*/_bootlog.txt"


def model_of(name, **facts):
    return ModelArchitecture.from_config(dict(catalogue.find(name).architecture.facts) | facts)


def budget_of(name, card, engine, facts=None, **settings):
    accelerator = hardware.find(card)
    return compute_budget(
        model_of(name, **(facts or {})),
        accelerator,
        profile_for(engine, accelerator),
        EngineSettings(**settings),
    )


@pytest.mark.parametrize(
    ("name", "engine", "settings", "gib", "printed", "source"),
    [
        # KV GiB as printed, and blocks or tokens as printed for it.
        ("llama-3.1-8b", "vllm@0.6.0", {}, 3.81, {"blocks": 1952}, "vllm issue 10517"),
        ("qwen3-8b", "vllm@0.11.0", {}, 50.32, {"tokens": 366_400}, "docs.lmcache.ai faq"),
        ("llama-3.1-70b", "vllm@0.11.0", {"tensor_parallel": 4}, 32.06, {"tokens": 420_208},
         "docs.lmcache.ai faq"),
        ("kimi-k2", "vllm@0.11.1", {"tensor_parallel": 8, "block_tokens": 64}, 46.80,
         {"tokens": 715_072}, "recipes, moonshotai/Kimi-K2-Think.md"),
        ("gpt-oss-20b", "vllm@0.13.0", {"step_tokens": 2048, "max_context_tokens": 8192}, 12.94,
         {"tokens": 282_624, "concurrency": 54.44}, "VLLM-ROUTER, logs/vllm.log"),
        ("gemma-4-26b-a4b", "vllm@0.25.1", {"step_tokens": 2496, "max_context_tokens": 262_144},
         83.89, {"concurrency": 14.78}, "dgx-spark-local-llm, gemma4-int4.log"),
        ("qwen3.5-35b-a3b", "vllm@0.19.2", {"max_context_tokens": 131_072}, 47.55,
         {"tokens": 623_040, "concurrency": 18.44}, SPARK),
        ("qwen3-32b", "sglang", {"tensor_parallel": 8}, 35.78, {"tokens": 1_172_096},
         "for_debug, test_ascend_qwen3_32b_bf16_4p"),
    ],
)  # fmt: skip
def test_capacity_from_printed_kv_bytes(name, engine, settings, gib, printed, source):
    card = "ascend-910b" if engine == "sglang" else "h100"
    budget = budget_of(name, card, engine, kv_cache_bytes=int(gib * GIB), **settings)
    found = {
        "blocks": budget.blocks,
        "tokens": profile_for(engine, hardware.find(card)).printed_tokens(
            budget.layout, budget.blocks, budget.max_context_tokens
        ),
        "concurrency": budget.layout.concurrency(budget.blocks, budget.max_context_tokens),
    }
    for unit, value in printed.items():
        assert found[unit] == pytest.approx(value, rel=0.0015), (unit, source)


@pytest.mark.parametrize(
    ("name", "facts", "card", "engine", "settings", "gib", "within", "source"),
    [
        ("llama-3.1-8b", {}, "h100", "vllm@0.11.0", {"memory_utilization_percent": 90}, 51.38,
         0.005, PLANNER),
        ("qwen3-0.6b", {}, "h100", "vllm@0.11.0", {"memory_utilization_percent": 90}, 64.45, 0.005,
         PLANNER),
        ("qwen3-32b", {}, "h100", "vllm@0.11.0",
         {"memory_utilization_percent": 90, "tensor_parallel": 2}, 34.49, 0.005, PLANNER),
        # The source's images are 0.11 to 0.13; with Triton's experts from 0.11.1 on.
        ("gpt-oss-20b", {}, "h100", "vllm@0.13.0", {"memory_utilization_percent": 90}, 50.28, 0.005,
         PLANNER),
        ("llama-3.1-70b", {"quantization": "fp8"}, "h100", "vllm@0.11.0",
         {"memory_utilization_percent": 90, "tensor_parallel": 2}, 32.00, 0.01, PLANNER),
        ("llama-3.1-8b", {}, "rtx-3090", "vllm@0.6.4",
         {"memory_utilization_percent": 90, "max_context_tokens": 20_000}, 3.81, 0.02,
         "vllm issue 10517"),
        ("qwen3-30b-a3b", {"quantization": "fp8"}, "h100", "vllm@0.22.1",
         {"max_sequences": 64, "step_tokens": 8192}, 42.54, 0.02, "mlops-assignment, logs/vllm.log"),
        ("qwen3.5-35b-a3b", {}, "gb10", "vllm@0.19.2", {"memory_utilization_percent": 95}, 47.55,
         0.03, SPARK),
        ("qwen3-32b", {}, "ascend-910b", "sglang",
         {"memory_utilization_percent": 72, "tensor_parallel": 8}, 35.78, 0.03,
         "for_debug, test_ascend_qwen3_32b_bf16_4p"),
    ],
)  # fmt: skip
def test_kv_bytes_from_card_model_and_flags(
    name, facts, card, engine, settings, gib, within, source
):
    budget = budget_of(name, card, engine, facts, **settings)
    assert budget.kv_bytes / GIB == pytest.approx(gib, rel=within), source
    assert budget.kv_low_bytes <= budget.kv_bytes <= budget.kv_high_bytes


@pytest.mark.parametrize(
    ("name", "facts", "card", "engine", "settings", "source"),
    [
        # Starts that failed for want of memory.
        ("llama-3.1-70b", {"quantization": "fp8"}, "h100", "vllm@0.11.0",
         {"memory_utilization_percent": 90, "max_context_tokens": 16_000}, PLANNER),
        ("gpt-oss-120b", {}, "h100", "vllm@0.10.0", {"memory_utilization_percent": 90},
         "vllm issue 23278"),
        ("llama-3.1-8b", {}, "rtx-3090", "vllm@0.6.4",
         {"memory_utilization_percent": 90, "max_context_tokens": 29_000}, "vllm issue 10517"),
    ],
)  # fmt: skip
def test_starts_that_failed_are_called(name, facts, card, engine, settings, source):
    budget = budget_of(name, card, engine, facts, **settings)
    assert not budget.fit.fits, source
    assert "does not fit by" in budget.fit.message


def test_memory_that_a_context_needs_is_what_the_engine_says():
    # Llama 4 Scout on 8 ranks, vLLM 0.8.3: "24.0 GiB KV cache is needed" for 1,048,576 tokens.
    scout = budget_of("llama-4-scout", "h200", "vllm@0.8.3", tensor_parallel=8,
                      max_context_tokens=1_048_576)  # fmt: skip
    assert scout.fit.needed_bytes / GIB == pytest.approx(24.0, rel=0.001)


def test_llama_cpp_allocates_what_the_context_takes():
    # "KV self size = 4096 MiB" of Llama-3.2-1B at 131,072 tokens (bgpr/armage, llama_server.log).
    budget = budget_of("llama-3.2-1b", "rtx-3090", "llama.cpp", max_context_tokens=131_072)
    assert budget.kv_bytes == 4096 << 20
    assert budget.blocks == 131_072
    assert budget.fit.fits
    too_long = budget_of("llama-3.1-8b", "rtx-3080", "llama.cpp", max_context_tokens=131_072)
    assert not too_long.fit.fits


def test_tensorrt_llm_takes_its_share_of_what_is_free():
    # 0.9 x 21.89 GiB free = 631 blocks of 64 x 524,288 B (TensorRT-LLM issue 2268).
    budget = budget_of("llama-3.1-8b", "a100", "tensorrt-llm@0.13.0",
                       {"num_key_value_heads": 32}, max_sequences=8)  # fmt: skip
    assert budget.block_bytes == 64 * 524_288
    free = budget.device_bytes - budget.overhead_bytes
    assert budget.kv_bytes == pytest.approx(0.9 * free, abs=1)
    assert int(0.9 * 21.89 * GIB) // budget.block_bytes == 630
