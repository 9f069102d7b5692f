"""A fault that is not told completely does not count as survived."""

import json
from pathlib import Path

import pytest

from tests.chaos.rows import Faults, Row, table, write


def test_a_row_holds_only_when_everything_was_said(tmp_path: Path) -> None:
    rows: list[Row] = []
    faults = Faults("test_x", rows)
    with faults.row("a node gone") as row:
        row.recovered("nothing", "Ready=True")
    with pytest.raises(AssertionError, match="what status said"), faults.row("half told") as row:
        row.recovered("nothing", "")
    with pytest.raises(ValueError, match="boom"), faults.row("broken"):
        raise ValueError("boom\nand more")
    assert [row.held for row in rows] == [True, False, False]
    report = tmp_path / "deep" / "report.json"
    write(rows, report)
    told = json.loads(report.read_text())["faults"]
    assert [(f["fault"], f["holds"], f["problem"]) for f in told] == [
        ("a node gone", True, ""),
        ("half told", False, "half told: did not say what status said"),
        ("broken", False, "boom"),
    ]
    assert told[2]["recovery_seconds"] is None
    drawn = table(rows)
    assert "FAILED: boom" in drawn
    assert "0 s" in drawn
