"""Amounts on the command line: memory and bandwidth in the units that people write, shares, observations."""

import re
from decimal import Decimal

import click
from kvscaler.budget import Observation

_UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip
_QUANTITY = re.compile(r"(\d{1,24}(?:\.\d{1,24})?)\s*([kMGT]i?|Ki|K)?")
_LARGEST_BYTES = 1 << 60


def parse_bytes(text: str) -> int | None:
    """Bytes of `79.3GiB`, `80Gi`, `80GB` or a plain number; `None` for anything else, and for 0."""
    match = _QUANTITY.fullmatch(text.strip().removesuffix("B"))
    if match is None:
        return None
    unit = "k" if match[2] == "K" else match[2] or ""
    size = int(Decimal(match[1]) * _UNITS[unit])
    return size if 0 < size < _LARGEST_BYTES else None


class MemoryType(click.ParamType[int]):
    """A quantity such as `79.3GiB`, `80Gi`, `1536Mi` or a plain number of bytes."""

    name = "memory"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes of `value`; fails with the forms that are understood."""
        if isinstance(value, int):
            return value
        found = parse_bytes(str(value))
        if found is None:
            self.fail(
                f"{str(value)[:40]!r} is no amount of memory; write 79.3GiB, 80Gi, 80GB or bytes",
                param,
                ctx,
            )
        return found


class CountType(click.ParamType[int]):
    """A whole number of `least` or more."""

    name = "N"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The number; fails for anything else, and for more than any engine counts."""
        text = str(value).replace(",", "").replace("_", "").strip()
        if not re.fullmatch(r"\d{1,12}", text) or int(text) < self._least:
            self.fail(
                f"{str(value)[:40]!r} is no whole number of {self._least} or more", param, ctx
            )
        return int(text)


class BandwidthType(click.ParamType[float]):
    """Bytes per second, such as `3.35TB/s` or `864G`."""

    name = "bandwidth"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Bytes per second of `value`; fails with the forms that are understood."""
        if isinstance(value, float):
            return value
        found = parse_bytes(str(value).strip().removesuffix("/s"))
        if found is None:
            self.fail(
                f"{str(value)[:40]!r} is no bandwidth; write 3.35TB/s, 864GB/s or bytes per second",
                param,
                ctx,
            )
        return float(found)


class ShareType(click.ParamType[float]):
    """A share of memory: `0.9`, or `90%`. Its value is in percent."""

    name = "share"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Percent; fails for what is not above 0 and at most 1, and says how to write it."""
        text = str(value).strip()
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(%?)", text)
        percent = float(match[1]) * (1 if match[2] else 100) if match else 0.0
        if not 0 < percent <= 100:
            hint = f"; for {text} percent write {text}%" if match and not match[2] else ""
            self.fail(
                f"{text[:40]!r} is no share of memory: write 0.9 or 90%, at most 1{hint}",
                param,
                ctx,
            )
        return round(percent, 9)


class ObservationType(click.ParamType[Observation]):
    """What an engine printed of its pool: `51.38GiB`, `27000blocks` or `432000tokens`."""

    name = "pool"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Observation:
        """The observation; fails with the forms that are understood."""
        if isinstance(value, Observation):
            return value
        text = str(value).strip()
        if match := re.fullmatch(r"([\d,_]{1,20})\s*(blocks?|tokens?)", text):
            digits = re.sub(r"[,_]", "", match[1])
            if digits.strip("0"):
                count = int(digits)
                blocks = match[2].startswith("block")
                return Observation(blocks=count) if blocks else Observation(tokens=count)
        elif (found := parse_bytes(text)) is not None:
            return Observation(kv_bytes=found)
        self.fail(
            f"{text[:40]!r} is no size of a pool; write what the engine printed as 51.38GiB, "
            "27000blocks or 432000tokens",
            param,
            ctx,
        )


COUNT = CountType()
COUNT_OR_NONE = CountType(0)
MEMORY = MemoryType()
BANDWIDTH = BandwidthType()
SHARE = ShareType()
OBSERVATION = ObservationType()
