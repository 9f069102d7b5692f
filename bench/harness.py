"""What every benchmark shares: one JSON object on standard output, ratios in one run, floors.

Machines differ fourfold, so a speed is a ratio against a peer measured in the same run, by turns
(`alternate`), as a median with an interval. A benchmark exits 0 when it could measure, whatever
came out; with `--check` it exits 1 when a figure misses its floor.
"""

import argparse
import importlib.metadata
import json
import operator
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "cli", "crds", "operator", "sidecar", "kernels")
for _room in reversed(ROOMS):  # so that a clone runs its own code without being installed
    if str(ROOT / _room) not in sys.path:
        sys.path.insert(0, str(ROOT / _room))

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}

REFERENCE_APPENDS_PER_SECOND = 30e6
"""List appends a second of the core that absolute speeds are stated for."""


@dataclass(frozen=True)
class Figure:
    """One number with its unit (`"1"` for a ratio), floor and aim such as `">= 1.0"`.

    `value=None` means that it could not be measured here; `why` says why, and a floor then does
    not hold.
    """

    name: str
    value: float | None
    unit: str = "1"
    floor: str | None = None
    aim: str | None = None
    peer: Mapping[str, float] | None = None
    why: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value meets the floor; `None` without a floor."""
        return None if self.floor is None else meets(self.value, self.floor)

    def to_json(self) -> dict[str, Any]:
        """The figure as the report prints it, absent parts left out."""
        out: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit}
        if self.floor is not None:
            out |= {"floor": self.floor, "holds": self.holds}
        if self.aim is not None:
            out |= {"aim": self.aim, "aim_met": meets(self.value, self.aim)}
        if self.peer is not None:
            out["peer"] = dict(self.peer)
        if self.why:
            out["why"] = self.why
        return out


def meets(value: float | None, bound: str) -> bool:
    """Whether `value` satisfies a bound such as `"<= 6"`; a missing or NaN value never does."""
    sign, _, number = bound.partition(" ")
    if sign not in _COMPARISONS:
        raise ValueError(f"bound {bound!r} must look like '>= 1.0'")
    return value is not None and _COMPARISONS[sign](value, float(number))


def progress(message: str) -> None:
    """Say on standard error what is being measured; standard output holds the JSON only."""
    print(message, file=sys.stderr, flush=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--check`; add what the benchmark needs besides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit 1 when a floor is missed")
    return parser


def machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """CPU, cores usable here, memory bytes, GPUs and versions of Python and `packages`."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu_names(),
        "versions": versions,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


@dataclass(frozen=True)
class Sample:
    """Values of one subject, in the order measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median; a virtual machine's outliers make a mean useless."""
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Order statistics that hold the median with about 95 % (normal approximation)."""
        ordered, count = sorted(self.values), len(self.values)
        reach = 0.98 * count**0.5
        low = max(0, int(count / 2 - reach))
        return ordered[low], ordered[count - 1 - low]

    def to_json(self) -> dict[str, Any]:
        """Median, interval and number of rounds."""
        return {"median": self.median, "interval": list(self.interval), "rounds": len(self.values)}


def alternate(subjects: Mapping[str, Callable[[], float]], rounds: int = 15) -> dict[str, Sample]:
    """Call each subject once a round, first and last by turns; each returns its own figure."""
    values: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            values[name].append(subjects[name]())
    return {name: Sample(tuple(found)) for name, found in values.items()}


def ratio(ours: Sample, peer: Sample) -> Sample:
    """Ours divided by the peer's, round by round, so that a slow moment hits both."""
    return Sample(tuple(a / b for a, b in zip(ours.values, peer.values, strict=True)))


def appends_per_second(count: int = 1_000_000) -> float:
    """List appends a CPU second in a plain loop: the yardstick of this core at this moment."""
    start = time.process_time()
    items: list[int] = []
    for number in range(count):
        items.append(number)
    return len(items) / (time.process_time() - start)


@dataclass
class Peer:
    """A benchmark's own script run by another environment's interpreter, one JSON line a round.

    The script is started once with `arguments`. For each line on its standard input, which names
    what to measure, it answers with a JSON object on one line, so that ours and theirs alternate.
    """

    python: str
    script: Path
    arguments: Sequence[str] = ()
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def measure(self, what: str = "measure") -> dict[str, Any]:
        """One round; raises `RuntimeError` with the peer's own words when it fails."""
        if self.process is None:
            self.process = subprocess.Popen(
                [self.python, str(self.script), *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.python} {self.script} ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the peer by closing its input."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=60)


def report(
    bench: str,
    figures: Sequence[Figure],
    detail: Mapping[str, Any] | None = None,
    *,
    check: bool = False,
    packages: Iterable[str] = (),
) -> int:
    """Print the JSON report; the exit status: 1 only with `check` and a missed floor."""
    body = {
        "bench": bench,
        "machine": machine(packages),
        "figures": [figure.to_json() for figure in figures],
        "detail": dict(detail or {}),
    }
    print(json.dumps(body, indent=2, allow_nan=False))
    missed = [figure.name for figure in figures if figure.holds is False]
    for name in missed:
        progress(f"{bench}: {name} misses its floor")
    return 1 if check and missed else 0
