"""Processor time and memory of a process, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the start of the process: user and system time; memory now and at its peak."""

    cpu_seconds: float
    resident_bytes: int
    peak_bytes: int


def usage(pid: int) -> Usage:
    """What process `pid` took; raises `OSError` when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )

    def kibibytes(name: str) -> int:
        return int(status.get(name, "0 kB").split()[0]) * 1024

    ticks = int(fields[11]) + int(fields[12])
    return Usage(ticks / _TICKS_PER_SECOND, kibibytes("VmRSS"), kibibytes("VmHWM"))
