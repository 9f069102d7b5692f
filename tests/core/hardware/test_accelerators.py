"""Accelerators: found by any usual name, memory as the driver reports it, a source per row."""

import pytest
from kvscaler.hardware import UnknownAccelerator, accelerators, find


@pytest.mark.parametrize("name", ["h100", "NVIDIA-H100-80GB-HBM3", "nvidia h100 80gb hbm3"])
def test_found_by_name_and_alias(name):
    assert find(name).name == "nvidia-h100-80gb-hbm3"


def test_an_80_gb_card_offers_less_than_80_gb():
    assert 79.1 < (find("h100").memory_bytes or 0) / 2**30 < 79.7


def test_a_cpu_has_no_memory_of_its_own():
    cpu = find("cpu")
    assert cpu.memory_bytes is None
    assert cpu.with_memory(5).memory_bytes == 5


def test_names_are_unique_and_sources_given():
    names = [n.casefold() for a in accelerators() for n in (a.name, *a.aliases)]
    assert len(names) == len(set(names))
    assert all(a.source for a in accelerators())


@pytest.mark.parametrize(
    ("name", "near"),
    [("h1000", "nvidia-h100"), ("rtx4099", "nvidia-geforce-rtx-4090"), ("abacus", "nvidia-l40s")],
)
def test_unknown_names_the_ones_that_come_near(name, near):
    with pytest.raises(UnknownAccelerator, match=rf"'{name}'.*{near}.*memory") as raised:
        find(name)
    assert len(str(raised.value)) < 300


def test_thirty_cards_and_more_of_every_make():
    assert len(accelerators()) >= 30
    devices = {card.device for card in accelerators()}
    assert devices >= {"cuda", "rocm", "npu", "hpu", "cpu"}
    assert find("dgx-spark").unified
    assert find("mi300x").device == "rocm"
    assert find("gaudi3").device == "hpu"


@pytest.mark.parametrize("card", accelerators(), ids=lambda card: card.name)
def test_figures_are_plausible(card):
    assert card.source.startswith("memory")
    if card.memory_bytes is None:
        return
    low, high = card.memory_range_bytes or (card.memory_bytes, card.memory_bytes)
    assert low <= card.memory_bytes <= high
    assert 8 << 30 < card.memory_bytes < 300 << 30
    assert 1e11 < card.bandwidth_bytes_per_second < 1e13
    assert all(1e13 < rate < 1e16 for rate in card.flops_per_second.values())


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        # As printed: llm-d-planner docs/empirical-vllm-memory-results.md; vLLM issue 10517; TensorRT-LLM
        # issue 2268; tensorrtllm_backend docs/multimodal.md; DeeperPhysicsWIP logs/vllm.log.
        ("h100", 79.18), ("rtx-3090", 23.63), ("a100-40gb", 39.39), ("h100-nvl", 93.1),
        ("a100-80gb", 79.25), ("gh200", 95.0), ("gb10", 121.69),
    ],
)  # fmt: skip
def test_memory_is_what_drivers_report(name, gib):
    assert find(name).memory_bytes / 2**30 == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        # Totals that torch and CUDA name for these cards in public logs, by driver.
        ("h100", 81_089), ("h100-pcie", 81_008), ("h100-nvl", 95_320), ("h200", 143_156),
        ("h20", 97_285), ("b200", 182_631), ("l40s", 45_589), ("l4", 22_563), ("l4", 22_693),
        ("a10g", 22_587), ("a10g", 22_723), ("a30", 24_164), ("a40", 45_416), ("a800", 81_051),
        ("a6000", 48_676), ("a4000", 16_117), ("rtx-6000-ada", 48_497), ("rtx-pro-6000", 97_250),
        ("rtx-5090", 32_102), ("rtx-4090", 24_217), ("rtx-4090", 24_081), ("rtx-4080", 16_049),
        ("rtx-3090", 24_268), ("rtx-3090", 24_124), ("rtx-3080", 10_002), ("t4", 15_110),
        ("t4", 14_912), ("v100-32gb", 32_501), ("v100-16gb", 16_130), ("mi300x", 196_592),
        ("mi250x", 65_520), ("mi210", 65_520), ("a5000", 24_138), ("rtx-3060", 11_931),
        ("rtx-4070-ti-super", 15_974), ("rtx-5060-ti-16gb", 15_841),
    ],
)  # fmt: skip
def test_ranges_hold_what_public_logs_name(name, mib):
    low, high = find(name).memory_range_bytes
    assert low <= mib << 20 <= high
    assert find(name).memory_bytes == pytest.approx(mib << 20, rel=0.007)


def test_stated_memory_has_no_range():
    assert find("h100").with_memory(64 << 30).memory_range_bytes is None
