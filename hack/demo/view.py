"""The live view: what a person at the terminal sees while the spike comes and goes."""

import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hack.demo.observe import Sample
from hack.demo.traffic import Result, Traffic

RECENT_SECONDS = 10.0


def quantile(values: list[float], share: float) -> float | None:
    """The `share` quantile of `values` (nearest rank); `None` without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _bar(used: int, reserved: int, capacity: int, width: int = 30) -> Text:
    """Referenced (full), reserved but not yet referenced (half), free (dots)."""
    scale = width / max(1, capacity)
    full = min(width, round(used * scale))
    promised = min(width, max(full, round(reserved * scale)))
    bar = Text("█" * full, style="green")
    bar.append("▒" * (promised - full), style="yellow")
    bar.append("·" * (width - promised), style="dim")
    return bar


class View:
    """Draws samples on a terminal, or prints a line every two seconds where there is none."""

    def __init__(self, traffic: Traffic, start: float, title: str = "kvscaler demo") -> None:
        self.traffic, self.start, self.title = traffic, start, title
        self.console = Console()
        self.words: list[tuple[float, str]] = []
        self._live: Live | None = None
        self._last_line = 0.0

    def __enter__(self) -> "View":
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)

    def show(self, sample: Sample) -> None:
        """Draw `sample`, and remember the operator's words when they changed."""
        decision = ((sample.service or {}).get("status") or {}).get("decision") or {}
        message = decision.get("message")
        if message and (not self.words or self.words[-1][1] != message):
            self.words.append((sample.at, message))
        if self._live is not None:
            self._live.update(self._draw(sample, decision))
        elif sample.at - self._last_line >= 2.0:
            self._last_line = sample.at
            print(self._line(sample, decision), flush=True)

    def _recent(self) -> list[Any]:
        since = time.monotonic() - RECENT_SECONDS
        return [r for r in self.traffic.requests if (r.ended_at or 0) > since]

    def _totals(self) -> tuple[int, int, int, int]:
        requests = self.traffic.requests
        by = {result: sum(1 for r in requests if r.result is result) for result in Result}
        return len(requests), by[Result.OK], by[Result.REFUSED], by[Result.BROKEN]

    def _line(self, sample: Sample, decision: dict[str, Any]) -> str:
        offered, ok, refused, broken = self._totals()
        pods = " ".join(
            f"{p.state['occupancy']['referenced_blocks']}/{p.state['occupancy']['reserved_blocks']}"
            f"/{p.state['occupancy']['capacity_blocks']}"
            for p in sample.pods
            if p.state and p.state.get("occupancy")
        )
        return (
            f"{sample.at - self.start:6.1f} s  {self.traffic.phase:<8} "
            f"ready {sample.ready}/{sample.desired}  KV {pods or '–'}  "
            f"waiting {sample.blocks('waiting_requests')}  ok {ok} refused {refused} "
            f"broken {broken} of {offered}  "
            f"{decision.get('bindingConstraint', '')}"
        )

    def _draw(self, sample: Sample, decision: dict[str, Any]) -> Panel:
        pods = Table(box=None, pad_edge=False)
        for heading, align in (("POD", "left"), ("KV BLOCKS", "left"), ("REF", "right"),
                               ("RES", "right"), ("CAP", "right"), ("RUN", "right"),
                               ("WAIT", "right"), ("PHASE", "left")):  # fmt: skip
            pods.add_column(heading, justify=align)
        for pod in sample.pods:
            occupancy = (pod.state or {}).get("occupancy")
            if pod.state and occupancy:
                phase = pod.state["drain"]["phase"] if pod.ready or pod.terminating else "Starting"
                pods.add_row(
                    pod.name,
                    _bar(occupancy["referenced_blocks"], occupancy["reserved_blocks"],
                         occupancy["capacity_blocks"]),
                    str(occupancy["referenced_blocks"]), str(occupancy["reserved_blocks"]),
                    str(occupancy["capacity_blocks"]), str(occupancy["running_requests"]),
                    str(occupancy["waiting_requests"]), phase,
                )  # fmt: skip
            else:
                pods.add_row(pod.name, Text("starting", style="dim"), *["–"] * 5, "Pending")
        recent = self._recent()
        ttft = [r.first_token_seconds for r in recent if r.first_token_seconds is not None]
        gaps = [gap for r in recent for gap in r.token_gaps_seconds]
        offered, ok, refused, broken = self._totals()
        facts = Text.assemble(
            (f"{self.traffic.phase}", "bold cyan"),
            f" at {self.traffic.rate_per_second:.2f} requests/s    ready ",
            (f"{sample.ready}/{sample.desired}", "bold"),
            f"    offered {offered}  ok {ok}  refused {refused}  broken {broken}  "
            f"live {self.traffic.live}\n",
            f"last {RECENT_SECONDS:.0f} s: TTFT p50 {_seconds(quantile(ttft, 0.5))}, "
            f"p90 {_seconds(quantile(ttft, 0.9))}; between tokens p50 "
            f"{_seconds(quantile(gaps, 0.5))}, p90 {_seconds(quantile(gaps, 0.9))}",
        )
        words = Text("\nThe operator says\n", style="bold")
        for at, message in self.words[-5:]:
            words.append(f"{at - self.start:6.1f} s  ", style="dim")
            words.append(message + "\n", style="not bold")
        legend = Text("█ referenced  ▒ reserved  · free", style="dim")
        title = f"{self.title}   {sample.at - self.start:.0f} s"
        return Panel(Group(facts, Text(), pods, legend, words), title=title, expand=True)


def say(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)
