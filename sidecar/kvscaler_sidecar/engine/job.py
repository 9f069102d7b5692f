"""What the HTTP loop and the engine's thread exchange: jobs one way, events the other.

A job is one sequence. Its events arrive in one queue per HTTP request, tagged with the job's
index, in order. The engine's thread hands over the events of a step in one call.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvscaler.engine.request import EngineRequest, FinishReason

from kvscaler_sidecar.executors.seam import SamplingParams, TokenLogprobs
from kvscaler_sidecar.server.errors import Refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request holds its place in the projection: it will run to its end."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits within the bounds of admission's queue."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was refused, at once or after waiting."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Produced:
    """One output token; `text` is what became safe to send with it and may be empty."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. `text` is what had been held back; counts are the request's usage in tokens."""

    reason: FinishReason
    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    message: str = ""
    """What went wrong, when `reason` is `ERROR`."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Put by the HTTP loop itself: the client closed its connection."""


Event = Admitted | Queued | Rejected | Produced | Finished | ClientLeft


MAX_UNREAD = 16_384
"""Tokens, and logprobs of tokens, that a client may leave unread in one request: some megabytes."""


class Mailbox:
    """Events of one HTTP request; `put` runs in the HTTP loop.

    A stream's events wait here while its client reads slowly. The batch can't wait for one of its
    sequences, so beyond `MAX_UNREAD` the client counts as gone: its connection is cut by `cut`.
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        self._queue: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._cut = cut
        self._unread = 0
        self._closed = False

    def put(self, index: int, event: Event) -> None:
        """Add an event of job `index`."""
        if self._closed:
            return
        self._unread += _weight(event)
        if self._unread > MAX_UNREAD:
            log.info("cut: the client leaves its stream unread", extra={"tokens": self._unread})
            self._queue.clear()
            event = ClientLeft()
            self._cut()
        self._closed = isinstance(event, ClientLeft)
        self._queue.append((index, event))
        self._arrived.set()

    async def next(self) -> tuple[int, Event]:
        """The next event, when there is one."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        index, event = self._queue.popleft()
        self._unread -= _weight(event)
        return index, event


def _weight(event: Event) -> int:
    logprobs = event.logprobs if isinstance(event, Produced) else None
    return 1 if logprobs is None else 2 + len(logprobs.top)


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to generate, with everything the engine's thread needs to know about it."""

    request: EngineRequest
    sampling: SamplingParams
    mailbox: Mailbox
    index: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    held_bytes: int = 0
    """Memory that it holds while it waits, for the queue's bound in bytes."""
    first_token_seconds: float | None = field(default=None)
    last_token_seconds: float = 0.0
