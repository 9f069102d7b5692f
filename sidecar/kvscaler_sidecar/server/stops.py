"""Stop strings over a stream of text pieces, found across the borders of tokens.

Text that might be the beginning of a stop string is held back until the next piece decides, so no
client ever sees a part of one.
"""

from collections.abc import Sequence


class StopStrings:
    """Scans text as it grows; what is returned is safe to send."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add `text`; the part that can be sent now. After a match, `matched` is set.

        The earliest match in the text wins, and of two that begin at one place the one listed
        first; neither it nor what follows is returned.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        best = len(buffer)
        for stop in self._stops:
            at = buffer.find(stop, 0, best + len(stop))
            if at != -1 and at < best:
                best, self.matched = at, stop
        if self.matched is not None:
            self._held = ""
            return buffer[:best]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
