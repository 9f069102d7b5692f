"""Quantities that Pods state: `resource.Quantity`, with the milli-units that CPUs are given in.

The API server stores `0.5` as `500m`, so texts that differ can be the same amount.
"""

from decimal import Decimal, InvalidOperation
from typing import Any

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3),
    "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def amount(value: Any) -> Decimal | None:
    """The number that a quantity stands for; `None` for what is none."""
    text = str(value).strip()
    for length in (2, 1):
        scale = _SUFFIXES.get(text[-length:])
        if scale is not None and len(text) > length:
            text = text[:-length]
            break
    else:
        scale = Decimal(1)
    try:
        number = Decimal(text) * scale
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_quantity(one: Any, other: Any) -> bool:
    """Whether two texts are the same amount."""
    first = amount(one)
    return first is not None and other is not None and first == amount(other)


def memory_limit_bytes(container: dict[str, Any]) -> int | None:
    """Memory limit of a container in bytes; `None` when it has none that can be read."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    value = limits.get("memory") if isinstance(limits, dict) else None
    number = None if value is None else amount(value)
    return None if number is None or number < 1 else int(number)
