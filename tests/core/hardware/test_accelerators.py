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


def test_unknown_names_the_known_ones():
    with pytest.raises(UnknownAccelerator, match=r"'tpu'.*nvidia-l40s.*memory"):
        find("tpu")
