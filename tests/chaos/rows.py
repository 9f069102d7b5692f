"""What a fault came to, one row each: what users saw, what status said, how long it lasted.

A fault that only passes or fails teaches an operator of a cluster nothing. So every chaos test says
these three things, the run ends with a table of them, and `build/chaos/report.json` keeps it. A
test that leaves one of them out fails.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

REPORT = Path(__file__).parents[2] / "build" / "chaos" / "report.json"
TABLE_COLUMNS = 150
ROWS = pytest.StashKey[list["Row"]]()


@dataclass(slots=True)
class Row:
    """One fault. `strike` when it begins to act, `recovered` when all is well again."""

    fault: str
    test: str = ""
    users: str = ""
    status: str = ""
    recovery_seconds: float | None = None
    held: bool = False
    problem: str = ""
    _struck_at: float = field(default_factory=time.monotonic)

    def strike(self) -> None:
        """Count the time to recover from now: the fault acts, or has just been taken away."""
        self._struck_at = time.monotonic()

    def recovered(self, users: str, status: str) -> None:
        """All is as it should be again: what users saw meanwhile, and what status said."""
        self.recovery_seconds = round(time.monotonic() - self._struck_at, 1)
        self.users, self.status = users, status


class Faults:
    """Takes the rows of one test."""

    def __init__(self, test: str, rows: list[Row]) -> None:
        self._test, self._rows = test, rows

    @contextmanager
    def row(self, fault: str) -> Iterator[Row]:
        """A row that holds when the block ends without an error and has said everything."""
        row = Row(fault, self._test)
        self._rows.append(row)
        try:
            yield row
            assert row.recovery_seconds is not None, f"{fault}: did not say when it recovered"
            assert row.users, f"{fault}: did not say what users saw"
            assert row.status, f"{fault}: did not say what status said"
        except BaseException as error:
            row.problem = str(error).partition("\n")[0][:300] or type(error).__name__
            raise
        row.held = True


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    """Where a chaos test records its rows."""
    rows = request.config.stash.setdefault(ROWS, [])
    return Faults(request.node.nodeid, rows)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table, and the same as JSON."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    write(rows, REPORT)
    terminalreporter.section("faults")
    terminalreporter.write(table(rows))
    terminalreporter.write_line(f"also in {REPORT}")


def write(rows: list[Row], path: Path) -> None:
    """All rows as JSON at `path`."""
    document = {
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "faults": [
            {
                "fault": row.fault,
                "test": row.test,
                "users": row.users,
                "status": row.status,
                "recovery_seconds": row.recovery_seconds,
                "holds": row.held,
                "problem": row.problem,
            }
            for row in rows
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def table(rows: list[Row]) -> str:
    """The rows for a terminal."""
    drawn = Table(show_lines=True)
    for heading in ("fault", "what users saw", "what status said", "recovered"):
        drawn.add_column(heading, overflow="fold")
    for row in rows:
        seconds = f"{row.recovery_seconds:.0f} s" if row.recovery_seconds is not None else "-"
        outcome = seconds if row.held else f"FAILED: {row.problem}"
        drawn.add_row(row.fault, row.users, row.status, outcome)
    console = Console(width=TABLE_COLUMNS, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()
