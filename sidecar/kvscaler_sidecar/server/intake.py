"""Bodies of requests: bounded in length and in sum, and parsed without holding up the event loop."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvscaler_sidecar.server.exchange import Exchange
from kvscaler_sidecar.server.held import HeldBytes, Hold, Lane

INLINE_PARSE_BYTES = 64 * 1024
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of all requests that no limit of the engine counts yet."""

Parsed = TypeVar("Parsed")


class Intake:
    """Reads bodies of one server."""

    def __init__(self, max_body_bytes: int, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._lane = Lane()
        self.held = HeldBytes(max(max_held_bytes, 2 * max_body_bytes))

    def hold(self) -> Hold:
        """What one request will hold; a context manager."""
        return self.held.hold()

    async def read(
        self, exchange: Exchange, parse: Callable[[bytes], Parsed], hold: Hold
    ) -> tuple[bytes, Parsed, float]:
        """The body, what `parse` makes of it, and when it had arrived (monotonic seconds).

        Raises `Refusal` and `ClientGone`. The body's bytes are counted into `hold`.
        """
        body = await exchange.read_body(self._max_body_bytes, hold)
        arrival = time.monotonic()
        if len(body) <= INLINE_PARSE_BYTES:
            return body, parse(body), arrival
        # In a thread: the event loop answers probes meanwhile.
        return body, await self._lane.run(parse, body), arrival
