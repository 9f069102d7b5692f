"""Memory of requests that no limit of the engine counts yet, and work that holds more for a moment.

Admission bounds what waits for blocks. Before it, a request is a body that is being read, then
what parsing made of it, then prompts in the engine's inbox: bytes that a client decides on, for as
long as a step takes. They are counted together, and the one that would exceed the bound is refused.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from kvscaler.protocol.refusals import RefusalReason

from kvscaler_sidecar.server.errors import Refusal

Given = ParamSpec("Given")
Made = TypeVar("Made")


class HeldBytes:
    """Bytes of all requests that admission has not seen, at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0

    def hold(self) -> "Hold":
        """The part of one request, none at first."""
        return Hold(self)

    def change(self, count: int) -> None:
        """Count `count` more bytes, or refuse their request."""
        if count > 0 and self.bytes + count > self.limit_bytes:
            raise Refusal(
                RefusalReason.QUEUE_BYTES_FULL,
                f"Requests of {self.bytes} bytes are being read; try again shortly.",
                retry_after_seconds=1,
            )
        self.bytes += count


class Hold:
    """What one request holds, until it is released or its `with` block ends.

    Bytes count as they come, so that a client can't take room by announcing what it does not send.
    """

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._bytes = 0

    def add(self, count: int) -> None:
        """Hold `count` more; raises `Refusal`."""
        self.settle(self._bytes + count)

    def settle(self, count: int) -> None:
        """Hold `count` from now on; raises `Refusal` when that is more than there is room for."""
        if count > self._held.limit_bytes:
            raise Refusal(
                RefusalReason.BODY_TOO_LARGE,
                f"The request takes {count} bytes of memory, and there are never more than "
                f"{self._held.limit_bytes} for it. Send fewer messages or prompts at a time.",
            )
        self._held.change(count - self._bytes)
        self._bytes = count

    def release(self) -> None:
        """Hold nothing."""
        self.settle(0)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Lane:
    """Heavy work in a thread, one piece at a time: each holds a multiple of its input meanwhile."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def run(
        self, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs
    ) -> Made:
        """What `work` returns, while the event loop goes on."""
        async with self._free:
            return await asyncio.to_thread(work, *args, **named)
