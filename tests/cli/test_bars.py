"""The picture of a card's memory: bars lie where the memory does, and nothing vanishes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler_cli.planning.bars import ASCII, UNICODE, Scale, marks_for

GIB = 1 << 30


def test_lines_lie_one_after_the_other():
    scale = Scale(80 * GIB, 80 * GIB, 40)
    assert scale.bar(0, 20 * GIB, "=", ASCII) == "=" * 10
    assert scale.bar(20 * GIB, 40 * GIB, "#", ASCII) == " " * 10 + "#" * 20
    assert scale.bar(60 * GIB, 20 * GIB, ".", ASCII) == " " * 30 + "." * 10


def test_what_is_too_small_for_a_cell_is_still_seen():
    scale = Scale(80 * GIB, 80 * GIB, 40)
    assert scale.bar(20 * GIB, GIB // 8, "=", UNICODE) == " " * 10 + UNICODE.thin
    assert scale.bar(80 * GIB, 1, "=", UNICODE) == " " * 39 + UNICODE.thin
    assert scale.bar(20 * GIB, 0, "=", UNICODE) == ""


def test_the_end_of_the_device_is_marked_where_more_is_needed():
    scale = Scale(80 * GIB, 40 * GIB, 40)
    assert scale.bar(0, 10 * GIB, "=", ASCII) == "=====" + " " * 15 + "|"
    assert scale.bar(30 * GIB, 50 * GIB, "x", ASCII) == " " * 15 + "x" * 25
    assert scale.ruler("40 GiB") == "0" + "40 GiB".rjust(19)


@given(st.lists(st.integers(1, 200 * GIB), min_size=1, max_size=8), st.integers(8, 100))
def test_bars_never_overlap_and_leave_no_gap(sizes, cells):
    scale = Scale(sum(sizes), sum(sizes), cells)
    covered, at = 0, 0
    for size in sizes:
        bar = scale.bar(at, size, "#", ASCII)
        covered += bar.count("#")
        assert bar.count("#") == pytest.approx(cells * size / sum(sizes), abs=1)
        at += size
    assert covered == cells


@pytest.mark.parametrize(
    ("encoding", "marks"),
    [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("no such", ASCII)],
)
def test_only_what_a_terminal_can_show(encoding, marks):
    assert marks_for(encoding) is marks
