"""Amounts as people write them, and what is none."""

import click
import pytest
from kvscaler.budget import Observation
from kvscaler_cli.quantities import BANDWIDTH, MEMORY, OBSERVATION, SHARE, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("79.3GiB", int(79.3 * 2**30)), ("80Gi", 80 << 30), ("80GB", 80 * 10**9),
        ("80G", 80 * 10**9), ("1536Mi", 1536 << 20), ("1 TiB", 1 << 40), ("17", 17), ("3kB", 3000),
    ],
)  # fmt: skip
def test_memory_in_all_usual_units(text, size):
    assert parse_bytes(text) == pytest.approx(size, abs=1)
    assert MEMORY.convert(text, None, None) == parse_bytes(text)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "nan", "inf", "1e9", "80Gb", "GiB", "80 GiB GiB", "9" * 30, "2000000TiB"],
)
def test_what_is_no_memory(text):
    with pytest.raises(click.BadParameter, match=r"79\.3GiB"):
        MEMORY.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "rate"), [("3.35TB/s", 3.35e12), ("864GB/s", 8.64e11), ("900G", 9e11)]
)
def test_bandwidth(text, rate):
    assert BANDWIDTH.convert(text, None, None) == pytest.approx(rate)


@pytest.mark.parametrize(("text", "percent"), [("0.9", 90), (".5", 50), ("1", 100), ("92%", 92)])
def test_shares_are_fractions_or_percent(text, percent):
    assert SHARE.convert(text, None, None) == percent


@pytest.mark.parametrize("text", ["0", "1.1", "90", "101%", "-0.5", "nan", "", "9e-1"])
def test_what_is_no_share(text):
    with pytest.raises(click.BadParameter, match=r"write 0\.9 or 90%"):
        SHARE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("51.38GiB", Observation(kv_bytes=int(51.38 * 2**30))),
        ("27000blocks", Observation(blocks=27_000)),
        ("1 block", Observation(blocks=1)),
        ("432,000 tokens", Observation(tokens=432_000)),
    ],
)
def test_observations_as_engines_print_them(text, seen):
    assert OBSERVATION.convert(text, None, None) == seen


@pytest.mark.parametrize("text", ["", "0blocks", ",tokens", "many tokens", "-1blocks", "5 pages"])
def test_what_is_no_observation(text):
    with pytest.raises(click.BadParameter, match="27000blocks"):
        OBSERVATION.convert(text, None, None)
