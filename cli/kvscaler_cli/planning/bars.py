"""A card's memory as a picture: each line of the budget drawn where it lies, one below the other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters of the picture; `thin` is for what is too small to fill one."""

    used: str
    pool: str
    free: str
    missing: str
    thin: str
    end: str


UNICODE = Marks("▒", "█", "░", "╳", "▌", "│")
ASCII = Marks("=", "#", ".", "x", "|", "|")


def marks_for(encoding: str | None) -> Marks:
    """The marks that a terminal of this encoding can show."""
    try:
        "".join((UNICODE.used, UNICODE.pool, UNICODE.missing, UNICODE.end)).encode(
            encoding or "ascii"
        )
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


@dataclass(frozen=True, slots=True)
class Scale:
    """`cells` characters that stand for `total_bytes`, of which the device has `device_bytes`."""

    total_bytes: int
    device_bytes: int
    cells: int

    def _cell(self, position_bytes: int) -> int:
        return round(self.cells * position_bytes / self.total_bytes)

    def bar(self, start_bytes: int, size_bytes: int, mark: str, marks: Marks) -> str:
        """A line's bar from where the one above it ends; anything but nothing shows."""
        start = max(0, start_bytes)
        first, last = self._cell(start), self._cell(min(start + size_bytes, self.total_bytes))
        row = [" "] * self.cells
        for cell in range(first, last):
            row[cell] = mark
        if first == last and size_bytes > 0:
            row[min(first, self.cells - 1)] = marks.thin
        edge = self._cell(self.device_bytes)
        if edge < self.cells and row[edge] == " ":
            row[edge] = marks.end
        return "".join(row).rstrip()

    def ruler(self, words: str) -> str:
        """A header: 0 at the left, `words` where the device ends."""
        edge = max(self._cell(self.device_bytes), len(words) + 2)
        return "0" + words.rjust(edge - 1)
