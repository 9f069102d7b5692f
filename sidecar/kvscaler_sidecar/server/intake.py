"""Bodies of requests: bounded in length and in sum, and parsed without holding up the event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from kvscaler_sidecar.server.exchange import Exchange, HeldBytes

INLINE_PARSE_BYTES = 64 * 1024
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of all bodies that are being read or parsed at a time."""

Parsed = TypeVar("Parsed")


class Intake:
    """Reads bodies of one server."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._held = HeldBytes(max(MAX_HELD_BYTES, 2 * max_body_bytes))

    async def read(
        self, exchange: Exchange, parse: Callable[[bytes], Parsed]
    ) -> tuple[bytes, Parsed, float]:
        """The body, what `parse` makes of it, and when it had arrived (monotonic seconds).

        Raises `Refusal` and `ClientGone`.
        """
        body = await exchange.read_body(self._max_body_bytes, self._held)
        arrival = time.monotonic()
        try:
            if len(body) <= INLINE_PARSE_BYTES:
                return body, parse(body), arrival
            # In a thread: the event loop answers probes meanwhile.
            return body, await asyncio.to_thread(parse, body), arrival
        finally:
            self._held.release(len(body))
