"""Accelerators: memory as the driver reports it, bandwidth and dense rates, each with its source.

An "80 GB" card offers 79.2 GiB; a budget that starts from 80 GB crash-loops.
"""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Self


class UnknownAccelerator(LookupError):
    """No facts about the accelerator are known."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. `memory_bytes` is `None` where it is not a property of the device (a CPU)."""

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int | None
    bandwidth_bytes_per_second: float | None
    flops_per_second: dict[str, float]
    """Dense rates by element type."""
    device: str
    """`cuda`, `rocm`, `npu` (Ascend), `hpu` (Gaudi), `tpu` or `cpu`."""
    source: str
    architecture: str = ""
    """NVIDIA's name of the generation (`hopper`), which decides kernels and the size of a context."""
    unified: bool = False
    """Memory is the host's too, so the process and the page cache take their share."""
    link: str = ""
    """How several of them reach one another: `nvlink`, `xgmi`, `hccs`, `pcie` or nothing."""
    memory_range_bytes: tuple[int, int] | None = None
    """Smallest and largest total that logs show for this name (drivers and ECC differ)."""

    def with_memory(self, memory_bytes: int) -> Self:
        """The same device with another amount of memory: a CPU's limit, or what a user stated."""
        return replace(self, memory_bytes=memory_bytes, memory_range_bytes=None)


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All accelerators of the data file, in its order."""
    rows: list[dict[str, Any]] = json.loads(
        files("kvscaler.hardware").joinpath("accelerators.json").read_text("utf-8")
    )
    return tuple(_accelerator(row) for row in rows)


def _accelerator(row: dict[str, Any]) -> Accelerator:
    spread = row.get("memory_range_bytes")
    return Accelerator(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        memory_bytes=row["memory_bytes"],
        bandwidth_bytes_per_second=row["bandwidth_bytes_per_second"],
        flops_per_second=row["flops"],
        device=row["device"],
        source=row["source"],
        architecture=row.get("architecture", ""),
        unified=row.get("unified", False),
        link=row.get("link", ""),
        memory_range_bytes=(spread[0], spread[1]) if spread else None,
    )


def find(name: str) -> Accelerator:
    """The accelerator with this name or alias; case, spaces and hyphens do not matter.

    Raises `UnknownAccelerator` with the names that come near: a status has room for few.
    """
    wanted = _plain(name)
    for accelerator in accelerators():
        if wanted in {_plain(accelerator.name), *(_plain(a) for a in accelerator.aliases)}:
            return accelerator
    known = {_plain(x): a.name for a in accelerators() for x in (a.name, *a.aliases)}
    near = list(dict.fromkeys(known[x] for x in get_close_matches(wanted, known, n=4)))
    raise UnknownAccelerator(
        f"accelerator {name[:60]!r} is not one of the {len(accelerators())} that are known, such as "
        f"{', '.join(near or ['nvidia-h100-80gb-hbm3', 'nvidia-l40s', 'cpu'])}; "
        "name one of them, or give its memory instead"
    )


def custom(memory_bytes: int, bandwidth_bytes_per_second: float | None = None) -> Accelerator:
    """A device of which only the memory, and perhaps the bandwidth, is known."""
    return Accelerator(
        "custom", (), memory_bytes, bandwidth_bytes_per_second, {}, "cuda", "stated by the user"
    )


def _plain(name: str) -> str:
    return name.casefold().replace(" ", "").replace("-", "").replace("_", "")
