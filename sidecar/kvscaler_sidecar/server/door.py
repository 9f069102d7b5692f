"""Who comes in on port 8000, in every mode: counted before the first check, refused while draining.

The count comes first: a drain that saw no live request must not end the process while one has
passed its check.
"""

import logging
from collections.abc import Awaitable, Callable

from kvscaler.protocol.drain import DrainPhase
from kvscaler.protocol.refusals import RefusalReason

from kvscaler_sidecar.drain import Drain
from kvscaler_sidecar.server.errors import Refusal, error_body
from kvscaler_sidecar.server.exchange import ClientGone, Exchange

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class Door:
    """The way in. `refused` is told of refusals that no other counter has."""

    def __init__(self, drain: Drain, refused: Callable[[RefusalReason], None]) -> None:
        self._drain = drain
        self._refused = refused
        self.live_requests = 0
        """Requests accepted and not yet answered in full."""

    async def handle(self, exchange: Exchange, handler: Handler) -> None:
        """Run `handler`; every way that it can end is answered here."""
        if self._drain.phase is not DrainPhase.SERVING:
            exchange.extra_headers.append(("connection", "close"))
        try:
            await handler(exchange)
        except Refusal as refusal:
            if not refusal.counted:
                self._refused(refusal.reason)
            log.info("refused", extra={"reason": str(refusal.reason), "why": refusal.message})
            await exchange.refuse(refusal)
        except ClientGone:
            return
        except Exception:
            log.exception("request failed")
            if exchange.started:
                raise
            body = error_body(500, "The server failed; its log has the cause.", None, "internal")
            await exchange.send_json(500, body)

    def counted(self, handler: Handler) -> Handler:
        """`handler`, counted as live from before its first check to the end of its response."""

        async def handle(exchange: Exchange) -> None:
            self.live_requests += 1
            try:
                await handler(exchange)
            finally:
                self.live_requests -= 1

        return handle

    def check_open(self) -> None:
        """Raise `Refusal` when this replica has said goodbye."""
        if self._drain.phase in (DrainPhase.DRAINING, DrainPhase.EMPTY):
            raise Refusal(
                RefusalReason.DRAINING,
                "This replica is draining and takes no new requests; send it to another one.",
                retry_after_seconds=1,
            )
