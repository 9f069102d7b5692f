"""Reading fields of a configuration that anyone may have written: typed, bounded, all faults at once.

A wrong field is a problem with its name, never an exception from deep inside and never a guess.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.runs import read_runs

LARGEST = 1_000_000_000
"""No dimension of a model is larger; what is, is a mistake or an attack."""


def shown(value: Any) -> str:
    """`value` for an error message: never long."""
    text = repr(value) if not isinstance(value, (list, dict)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """Typed access to `config`; faults gather in `problems`."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = defaults
        self.problems: list[str] = []

    def get(self, *names: str) -> Any:
        """The first of `names` that is there and not null; then a default of the family."""
        for source in (self._config, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def has(self, *names: str) -> bool:
        """Whether any of `names` is there, not null and not empty."""
        return bool(self.get(*names))

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of `least` or more."""
        value = self.get(*names)
        if value is None:
            if default is None:
                self.problems.append(f"{names[0]} is missing")
                return max(1, least)
            return default
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number of 0 or more"
            self.problems.append(f"{names[0]} is {shown(value)}, not a {kind}")
            return max(1, least)
        if value > LARGEST:
            self.problems.append(f"{names[0]} is {shown(value)}, larger than any model's")
            return max(1, least)
        return value

    def optional(self, *names: str, least: int = 1) -> int | None:
        """A whole number, or `None` when it is not there."""
        return None if self.get(*names) is None else self.integer(*names, least=least)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{names[0]} is {shown(value)}, not true or false")
            return default
        return value

    def text(self, *names: str, default: str = "") -> str:
        """A short text."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 1000:
            self.problems.append(f"{names[0]} is {shown(value)}, not a short text")
            return default
        return value

    def runs(self, *names: str) -> tuple[tuple[str, int], ...]:
        """Runs of layers (see `runs`), empty when the field is not there."""
        value = self.get(*names)
        if value is None or value == []:
            return ()
        try:
            return read_runs(value)
        except ValueError as error:
            self.problems.append(f"{names[0]}: {error}")
            return ()

    def refuse(self) -> None:
        """Raise `ModelNotUnderstood` with all problems, if there are any."""
        if self.problems:
            raise ModelNotUnderstood(
                f"architecture not understood: {'; '.join(self.problems[:12])}. "
                "Give facts of a supported architecture in spec.model.architecture, or use a "
                "supported model."
            )
