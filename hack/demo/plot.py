"""The picture of a run: traffic, KV blocks, replicas and latency on one time axis."""

import base64
import html
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hack.demo.report import Phase
from hack.demo.traffic import Request, Result

BIN_SECONDS = 5.0
COLORS = {Result.OK: "#2a9d5c", Result.REFUSED: "#e9a23b", Result.BROKEN: "#c8372d"}


def draw(path: Path, rows: list[dict[str, Any]], requests: list[Request], phases: list[Phase],
         start: float, capacity: int) -> None:  # fmt: skip
    """Write the picture to `path` (PNG). `rows` is the report's timeline."""
    figure, axes = plt.subplots(4, 1, figsize=(12, 12), sharex=True, constrained_layout=True)
    at = [row["at"] for row in rows]
    end = max(at, default=1.0)
    for axis in axes:
        for phase in phases:
            if phase.name == "spike":
                axis.axvspan(phase.begin - start, phase.end - start, color="#4c78a8", alpha=0.08)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)

    bins = [i * BIN_SECONDS for i in range(int(end / BIN_SECONDS) + 2)]
    stacked = [[r.offered_at - start for r in requests if r.result is result] for result in COLORS]
    axes[0].hist(
        stacked,
        bins=bins,
        weights=[[1 / BIN_SECONDS] * len(values) for values in stacked],
        stacked=True,
        color=list(COLORS.values()),
        label=[result.value for result in COLORS],
    )
    axes[0].set_ylabel("requests offered per second")
    axes[0].set_title("What clients saw (by time of arrival)", loc="left", fontsize=10)

    axes[1].step(at, [r["capacity_blocks"] for r in rows], color="#333333", where="post",
                 label="capacity of all replicas")  # fmt: skip
    axes[1].fill_between(at, [r["reserved_blocks"] for r in rows], color="#e9a23b", alpha=0.4,
                         label="reserved (projected peak)")  # fmt: skip
    axes[1].fill_between(at, [r["referenced_blocks"] for r in rows], color="#2a9d5c", alpha=0.7,
                         label="referenced")  # fmt: skip
    axes[1].axhline(capacity, color="#999999", linestyle=":", label="one replica")
    axes[1].set_ylabel("KV blocks")
    axes[1].set_title("KV cache", loc="left", fontsize=10)

    axes[2].step(at, [r["desired"] for r in rows], where="post", color="#4c78a8", label="desired")
    axes[2].step(at, [r["ready"] for r in rows], where="post", color="#2a9d5c", label="ready")
    axes[2].step(at, [r["pods"] for r in rows], where="post", color="#999999", linestyle="--",
                 label="Pods (starting and draining too)")  # fmt: skip
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.get_major_locator().set_params(integer=True)
    axes[2].set_ylabel("replicas")
    axes[2].set_title("Replicas", loc="left", fontsize=10)

    served = [r for r in requests if r.first_token_seconds is not None]
    axes[3].plot([r.offered_at - start for r in served],
                 [r.first_token_seconds for r in served], ".", color="#4c78a8", alpha=0.6,
                 label="time to first token")  # fmt: skip
    axes[3].plot([r.offered_at - start for r in served if r.token_gaps_seconds],
                 [sum(r.token_gaps_seconds) / len(r.token_gaps_seconds)
                  for r in served if r.token_gaps_seconds], ".", color="#b279a2", alpha=0.6,
                 label="mean time per output token")  # fmt: skip
    axes[3].set_ylabel("seconds")
    axes[3].set_xlabel("seconds since the demo's traffic began (spike shaded)")
    axes[3].set_title("Latency of each request (by time of arrival)", loc="left", fontsize=10)
    for axis in axes:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
        axis.margins(x=0.01)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_html(path: Path, picture: Path, report: dict[str, Any],
               title: str = "kvscaler demo") -> None:  # fmt: skip
    """One self-contained page: the checks, the phases and the picture."""
    image = base64.b64encode(picture.read_bytes()).decode()
    checks = "".join(
        f"<tr><td>{'✓' if c['holds'] else '✗'}</td><td>{html.escape(c['name'])}</td>"
        f"<td>{html.escape(c['seen'])}</td></tr>"
        for c in report["checks"]
    )
    keys = ["phase", "rate_per_second", "offered", "ok", "refused", "broken", "attainment",
            "time_to_first_token_p50_seconds", "time_to_first_token_p90_seconds",
            "inter_token_p50_seconds", "inter_token_p90_seconds"]  # fmt: skip
    head = "".join(f"<th>{html.escape(key.replace('_', ' '))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(phase[key])}</td>" for key in keys) + "</tr>"
        for phase in report["phases"]
    )
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(title)}</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;"
        "padding:0 1em;color:#222}table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left}"
        "img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(report['summary'])}</p>"
        f"<h2>Checks</h2><table>{checks}</table>"
        f"<h2>Phases</h2><table><tr>{head}</tr>{body}</table>"
        f"<img alt='timeline of the run' src='data:image/png;base64,{image}'></html>",
        encoding="utf-8",
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else html.escape(str(value))
