"""Memory on the command line, in the units of Kubernetes quantities."""

import re
from decimal import Decimal

import click

_UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip


class MemoryType(click.ParamType[int]):
    """A quantity such as `80Gi`, `1536Mi` or a plain number of bytes."""

    name = "quantity"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes of `value`; fails with the forms that are understood."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]i?|Ki)?", str(value))
        if match is None:
            self.fail(f"{value!r} is not a quantity; write 80Gi, 1536Mi or bytes", param, ctx)
        size_bytes = int(Decimal(match[1]) * _UNITS[match[2] or ""])
        if size_bytes < 1:
            self.fail(f"{value!r} is no memory at all", param, ctx)
        return size_bytes


MEMORY = MemoryType()
