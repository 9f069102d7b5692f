"""What the HTTP loop and the engine's thread exchange: jobs one way, events the other.

A job is one sequence. Its events arrive in one queue per HTTP request, tagged with the job's
index, in order. The engine's thread hands over the events of a step in one call.
"""

import asyncio
from dataclasses import dataclass, field

from kvscaler.engine.request import EngineRequest, FinishReason

from kvscaler_sidecar.executors.seam import SamplingParams, TokenLogprobs
from kvscaler_sidecar.server.errors import Refusal


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request holds its place in the projection: it will run to its end."""


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


Event = Admitted | Rejected | Produced | Finished | ClientLeft


class Mailbox:
    """Events of one HTTP request; `put` runs in the HTTP loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def put(self, index: int, event: Event) -> None:
        """Add an event of job `index`."""
        self._queue.put_nowait((index, event))

    async def next(self) -> tuple[int, Event]:
        """The next event, when there is one."""
        return await self._queue.get()


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to generate, with everything the engine's thread needs to know about it."""

    request: EngineRequest
    sampling: SamplingParams
    mailbox: Mailbox
    index: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    body_bytes: int = 0
    """Share of the HTTP body, for the queue's bound in bytes."""
    first_token_seconds: float | None = field(default=None)
    last_token_seconds: float = 0.0
