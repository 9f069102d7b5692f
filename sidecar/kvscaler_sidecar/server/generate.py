"""From a parsed request to its events: prompts to jobs, admission before headers, clean-up after.

The order keeps two promises: a refused request gets its own status, since nothing is sent before
all its sequences are admitted; and a client that leaves, at any time, has its sequences aborted.
"""

import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvscaler.engine.request import EngineRequest
from kvscaler.protocol.refusals import RefusalReason

from kvscaler_sidecar.engine.job import (
    Admitted,
    ClientLeft,
    Event,
    Job,
    Mailbox,
    Queued,
    Rejected,
)
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.exchange import ClientGone, Exchange
from kvscaler_sidecar.server.held import Lane
from kvscaler_sidecar.server.schema import NUMBER_BYTES

INLINE_TOKENIZE_CHARACTERS = 2000
"""Longer texts are tokenized in a thread: the event loop answers probes meanwhile."""
INLINE_MESSAGES = 20
"""Longer chats are rendered in a thread too."""
MAX_SEQUENCES_PER_REQUEST = 128
POINTER_BYTES = 8
JOB_BYTES = 2048
"""A waiting sequence without its prompt: its objects, here, in admission and in the engine."""


class Submitter(Protocol):
    """The engine as the HTTP loop uses it."""

    max_request_tokens: int
    """Longest prompt plus output that the limits in force admit."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Offer jobs for admission; the answers come to their mailboxes."""
        ...

    def abort(self, jobs: Sequence[Job]) -> None:
        """End jobs that nobody waits for; finished ones are left alone."""
        ...


async def tokenize(lane: Lane, encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Token ids of `text`, without holding up the event loop."""
    if len(text) <= INLINE_TOKENIZE_CHARACTERS:
        return encode(text)
    return await lane.run(encode, text)


async def render(
    lane: Lane,
    render_chat: Callable[[Sequence[dict[str, str]]], str],
    messages: Sequence[dict[str, str]],
) -> str:
    """The prompt of a chat, without holding up the event loop."""
    characters = sum(len(message["content"]) for message in messages)
    if len(messages) <= INLINE_MESSAGES and characters <= INLINE_TOKENIZE_CHARACTERS:
        return render_chat(messages)
    return await lane.run(render_chat, messages)


def prompt_bytes(prompt_tokens: int) -> int:
    """Memory of token ids in a list: pointers, and a number apiece."""
    return (POINTER_BYTES + NUMBER_BYTES) * prompt_tokens


def check_length(
    prompt_tokens: int,
    output_tokens: int | None,
    max_context_tokens: int,
    max_request_tokens: int,
    param: str,
) -> int:
    """Output tokens that the request may make: what it asks for, or what there is room for.

    Room is what the prompt leaves of the model's context and of the limits in force. Refuses an
    empty prompt, one that fills the context, and a sum that exceeds it; the rest is admission's.
    """
    if prompt_tokens == 0:
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            "The prompt is empty: it has no tokens. Send at least one.",
            param=param,
        )
    room = max_context_tokens - prompt_tokens
    if room < 1:
        raise Refusal(
            RefusalReason.CONTEXT_TOO_LONG,
            f"The prompt has {prompt_tokens} tokens; this model's maximum context length is "
            f"{max_context_tokens} tokens, with room for at least one output token. "
            "Send a shorter prompt.",
            param=param,
        )
    if output_tokens is None:
        return max(1, min(room, max_request_tokens - prompt_tokens))
    if output_tokens > room:
        raise Refusal(
            RefusalReason.CONTEXT_TOO_LONG,
            f"The prompt has {prompt_tokens} tokens and {output_tokens} output tokens were asked "
            f"for: {prompt_tokens + output_tokens} in all. This model's maximum context length is "
            f"{max_context_tokens} tokens. Ask for at most {room} output tokens, or send a "
            "shorter prompt.",
            param="max_tokens",
        )
    return output_tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """What all sequences of one HTTP request share."""

    request_id: str
    prompts: Sequence[list[int]]
    max_new_tokens: Sequence[int]
    choices: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignore_eos: bool
    cache_salt: str
    arrival_seconds: float


def check_sequences(prompts: int, choices: int) -> int:
    """Sequences of a request; too many are refused, best before any prompt is looked at."""
    total = prompts * choices
    if total > MAX_SEQUENCES_PER_REQUEST:
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            f"{prompts} prompts with n={choices} are {total} sequences; "
            f"one request may have {MAX_SEQUENCES_PER_REQUEST}.",
            param="n",
        )
    return total


def make_jobs(wanted: Wanted, mailbox: Mailbox) -> list[Job]:
    """One job per prompt and choice; choice i of a seeded request is seeded with seed + i.

    What the choices of a prompt share counts for the first of them.
    """
    check_sequences(len(wanted.prompts), wanted.choices)
    shared = JOB_BYTES + sys.getsizeof(wanted.cache_salt) + sum(map(sys.getsizeof, wanted.stops))
    jobs: list[Job] = []
    pairs = itertools.product(range(len(wanted.prompts)), range(wanted.choices))
    for index, (prompt, choice) in enumerate(pairs):
        request = EngineRequest.from_prompt(
            f"{wanted.request_id}-{index}",
            wanted.prompts[prompt],
            wanted.max_new_tokens[prompt],
            wanted.arrival_seconds,
        )
        request.cache_salt = wanted.cache_salt
        own = POINTER_BYTES * request.prompt_tokens + JOB_BYTES
        jobs.append(
            Job(
                request=request,
                sampling=wanted.sampling.for_choice(choice),
                mailbox=mailbox,
                index=index,
                stops=wanted.stops,
                ignore_eos=wanted.ignore_eos,
                held_bytes=own + (0 if choice else prompt_bytes(request.prompt_tokens) + shared),
            )
        )
    return jobs


@asynccontextmanager
async def admitted(
    engine: Submitter,
    exchange: Exchange,
    jobs: Sequence[Job],
    mailbox: Mailbox,
    offered: Callable[[], None],
) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
    """Events of `jobs` after all of them are admitted; whatever is left at the end is aborted.

    `offered` is called when admission has seen all of them: its queue bounds them from then on.
    Raises `Refusal` when one is refused (the others are aborted), and `ClientGone` when the client
    leaves, here or from the events.
    """
    watch = exchange.watch_disconnect()
    watch.add_done_callback(
        lambda task: None if task.cancelled() else mailbox.put(-1, ClientLeft())
    )
    engine.submit(jobs)
    early: list[tuple[int, Event]] = []
    try:
        waiting = len(jobs)
        unseen = {job.index for job in jobs}
        while waiting:
            index, event = await mailbox.next()
            unseen.discard(index)
            if not unseen:
                offered()
            match event:
                case ClientLeft():
                    raise ClientGone
                case Rejected(refusal):
                    raise refusal
                case Admitted():
                    waiting -= 1
                case Queued():
                    pass
                case _:
                    early.append((index, event))
        yield _events(mailbox, early)
    finally:
        exchange.close()
        engine.abort(jobs)


async def _events(
    mailbox: Mailbox, early: list[tuple[int, Event]]
) -> AsyncIterator[tuple[int, Event]]:
    for item in early:
        yield item
    while True:
        index, event = await mailbox.next()
        if isinstance(event, ClientLeft):
            raise ClientGone
        yield index, event


def new_request_id(prefix: str) -> str:
    """`cmpl-…` or `chatcmpl-…`, unique."""
    return f"{prefix}-{os.urandom(12).hex()}"
