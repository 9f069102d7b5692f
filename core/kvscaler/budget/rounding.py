"""Whole blocks: the one way in which sizes are rounded here."""


def ceil_div(value: int, unit: int) -> int:
    """`value / unit`, rounded up."""
    return -(-value // unit)


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return ceil_div(value, unit) * unit
