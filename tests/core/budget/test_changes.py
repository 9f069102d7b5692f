"""What other types would give, and the cheapest changes that make something fit."""

from dataclasses import replace

import pytest
from kvscaler import hardware
from kvscaler.budget import Demand, cheapest_changes, dtype_changes, held

from tests.core.budget.deployments import deployment

GIB = 1 << 30


def names(*arguments):
    return [change.name for change in cheapest_changes(*arguments)]


def test_what_other_types_would_change():
    asked = deployment(max_context_tokens=8192)
    changes = {change.name: change for change in dtype_changes(asked)}
    blocks = asked.budget().blocks
    assert changes["KV cache in fp8_e4m3"].budget.blocks == pytest.approx(2 * blocks, rel=0.001)
    assert changes["weights in fp8"].budget.kv_bytes > asked.budget().kv_bytes + 6 * GIB
    assert changes["weights in fp8"].settings == {"weights": "fp8"}


def test_only_types_that_the_engine_has_and_that_are_smaller():
    assert [c.settings for c in dtype_changes(deployment(engine="llama.cpp"))] == [
        {"kv_dtype": "q8_0"}, {"kv_dtype": "q4_0"},
        {"weights": "gguf-q8_0"}, {"weights": "gguf-q4_k_m"},
    ]  # fmt: skip
    older = [c.name for c in dtype_changes(deployment(engine="vllm@0.18.0"))]
    assert "KV cache in fp8_e4m3" in older
    assert "KV cache in int8_per_token_head" not in older
    small = deployment("gpt-oss-20b", engine="vllm", kv_dtype="fp8_e4m3")
    assert dtype_changes(small) == ()


def test_the_three_cheapest_changes_all_fit_and_nothing_is_said_where_all_is_well():
    asked = deployment(card="rtx-4090", max_context_tokens=131_072)
    assert not asked.budget().fit.fits
    changes = cheapest_changes(asked)
    assert len(changes) == 3
    assert all(change.budget.fit.fits for change in changes)
    assert changes[0].name.startswith("context of")
    assert cheapest_changes(deployment(max_context_tokens=8192)) == ()


def test_too_large_a_model_needs_fewer_bits_or_devices_or_a_larger_card():
    assert names(deployment("qwen3-32b", card="rtx-4090")) == [
        "weights in int4-g128", "nvidia-h100-pcie", "4 devices",
    ]  # fmt: skip


def test_utilization_is_raised_no_further_than_needed():
    usual = deployment(card="l4")
    slightly_more = usual.budget().pool_tokens + 2000
    asked = usual.changed(max_context_tokens=slightly_more)
    change = cheapest_changes(asked)[0]
    percent = change.settings["memory_utilization_percent"]
    assert 91 <= percent <= 95
    assert not asked.changed(memory_utilization_percent=percent - 1).budget().fit.fits


def test_a_demand_is_met_by_precision_or_by_replicas():
    asked, demand = deployment(), Demand(1200, 300, 500)
    changes = cheapest_changes(asked, demand)
    assert [change.name for change in changes] == [
        "KV cache in fp8_e4m3", "nvidia-h200", "2 replicas of 1 device",
    ]  # fmt: skip
    for change in changes:
        assert held(change.deployment, change.budget, demand) * change.replicas >= 500
    assert [change.devices for change in changes] == [1, 1, 2]


def test_smaller_weights_on_more_devices_are_tried_where_neither_is_enough():
    changes = cheapest_changes(deployment("llama-3.1-405b"))
    assert [(dict(change.settings), change.devices) for change in changes] == [
        ({"weights": "int4-g128", "tensor_parallel": 4}, 4),
        ({"weights": "fp8", "tensor_parallel": 8}, 8),
        ({"tensor_parallel": 8, "pipeline_parallel": 2}, 16),
    ]


def test_memory_that_is_a_limit_is_raised_no_further_than_needed():
    card = hardware.find("cpu").with_memory(600 << 20)
    older = [c.name for c in dtype_changes(deployment(engine="vllm@0.18.0"))]
    assert "KV cache in fp8_e4m3" in older
    assert "KV cache in int8_per_token_head" not in older
    small = deployment("smollm2-135m", "cpu", "kvscaler", memory_bytes=600 << 20)
    (change,) = cheapest_changes(small)
    mib = change.settings["memory_mib"]
    one_less = replace(small, accelerator=card.with_memory((mib - 1) << 20))
    assert change.budget.fit.fits
    assert not one_less.budget().fit.fits


def test_no_card_that_shares_its_memory_with_the_host_takes_the_place_of_one_that_does_not():
    asked = deployment("deepseek-v3", tensor_parallel=8)
    assert "nvidia-gb10" not in names(asked)


def test_a_limit_in_the_way_is_the_only_change_where_memory_is_enough():
    asked = deployment(max_context_tokens=4096, max_sequences=4)
    (change,) = cheapest_changes(asked, Demand(8000, 300, 20))
    assert change.settings == {"max_context_tokens": 8300, "max_sequences": 20}


def test_sglang_keeps_the_fraction_that_it_computes():
    usual = deployment(card="l4", engine="sglang")
    asked = usual.changed(max_context_tokens=usual.budget().pool_tokens + 2000)
    found = names(asked)
    assert found
    assert not any("utilization" in name for name in found)
