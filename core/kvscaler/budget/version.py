"""Engine versions: the number in whatever an engine, an image or a log calls itself."""

import re
from typing import Self

_NUMBER = re.compile(r"(?<![\w.])v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")


class Version(tuple[int, int, int]):
    """`(major, minor, patch)`, ordered; pre-releases count as their number."""

    def __new__(cls, major: int, minor: int = 0, patch: int = 0) -> Self:
        """A version by its numbers."""
        return super().__new__(cls, (major, minor, patch))

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """The first version number in `text`, `None` without one."""
        match = _NUMBER.search((text or "")[:200])
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]), int(match[3] or 0))

    def __str__(self) -> str:
        """As engines write it: `0.21.0`."""
        return ".".join(str(part) for part in self)
