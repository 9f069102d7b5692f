"""Runs of equal layers as text: `sliding_attention*5,full_attention*1`.

Facts travel as flat scalars (status, state page, digest), so a list with an entry per layer is kept
as its runs. Configurations that give counts without order (`layer_types_counts`) read as well.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LAYERS = 10_000
_RUN = re.compile(r"([\w.-]{1,40})\*(\d{1,5})")


def read_runs(value: Any) -> tuple[tuple[str, int], ...]:
    """`(name, count)` in order from a list, a mapping of counts, or the text of `write_runs`.

    Raises `ValueError` for anything else, and for more than `MAX_LAYERS` layers.
    """
    if isinstance(value, str):
        parts = value.split(",") if len(value) < 40 * MAX_LAYERS else ["too long"]
        found = [_RUN.fullmatch(part.strip()) for part in parts]
        if not all(found):
            raise ValueError(f"{value[:60]!r} is not a list of runs like full_attention*4")
        runs = [(match[1], int(match[2])) for match in found if match]
    elif isinstance(value, Mapping):
        runs = [(str(name)[:40], count) for name, count in list(value.items())[:MAX_LAYERS]]
    elif isinstance(value, Sequence):
        if len(value) > MAX_LAYERS:
            raise ValueError(f"it has {len(value)} entries, more than {MAX_LAYERS} layers")
        runs = []
        for item in value:
            name = str(item)[:40]
            if runs and runs[-1][0] == name:
                runs[-1] = (name, runs[-1][1] + 1)
            else:
                runs.append((name, 1))
    else:
        raise ValueError(f"it is a {type(value).__name__}, not a list")
    for name, count in runs:
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
            raise ValueError(f"{count!r} layers of {name!r} is no number of layers")
    return tuple(runs)


def write_runs(runs: Sequence[tuple[str, int]]) -> str:
    """The text that `read_runs` reads back."""
    return ",".join(f"{name}*{count}" for name, count in runs)


def count_of(runs: Sequence[tuple[str, int]], *names: str) -> int:
    """Layers of any of these names."""
    return sum(count for name, count in runs if name in names)
