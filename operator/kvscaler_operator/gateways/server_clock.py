"""How far a server's clock is from ours, so that times on its clock can be told on ours.

Prometheus stamps a scrape with its own clock. If that is a day ahead, what it says would stay fresh
for a day after it fell silent; if it is a minute behind, nothing that it says would be fresh at all.
So every answer's `Date` is compared with our clock. The difference is held as long as it explains
what is seen: were it measured anew each time, one scrape read twice would have two times and count
as two.
"""

from email.utils import parsedate_to_datetime

SLACK_SECONDS = 2.0
"""`Date` has whole seconds, and clocks that are kept in step differ by less than one."""


class ServerClock:
    """`offset_seconds` is what to add to the server's times to have them on our clock."""

    def __init__(self) -> None:
        self.offset_seconds = 0.0
        self._told = 0.0

    def compare(self, server: float, ours_before: float, ours_after: float) -> None:
        """Take one look at both clocks (Unix seconds), ours before and after the server's."""

        def explains(offset: float) -> bool:
            return ours_before - SLACK_SECONDS <= server + offset <= ours_after + SLACK_SECONDS

        if not explains(self.offset_seconds):
            # The earliest moment that it can have been: an age is over- and not underestimated.
            self.offset_seconds = 0.0 if explains(0.0) else ours_before - server

    def news(self) -> float | None:
        """An offset that was not told of yet; a clock that comes and goes is told of once."""
        if not self.offset_seconds or abs(self.offset_seconds - self._told) <= SLACK_SECONDS:
            return None
        self._told = self.offset_seconds
        return self._told


def date_of(header: str | None) -> float | None:
    """Unix seconds of an HTTP date; `None` for none, and for one that can't be read."""
    if header is None:
        return None
    try:
        return parsedate_to_datetime(header).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
