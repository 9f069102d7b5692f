"""From admitted sequences to a response: server-sent events as they come, or one whole object."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from kvscaler.engine.request import FinishReason
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import ExecutorReport

from kvscaler_sidecar.engine.job import Event, Finished, Mailbox, Produced
from kvscaler_sidecar.executors.seam import SamplingParams, Tokenizer
from kvscaler_sidecar.server.errors import Refusal, error_body
from kvscaler_sidecar.server.exchange import Exchange
from kvscaler_sidecar.server.format import ChoiceText, Shape, Usage
from kvscaler_sidecar.server.generate import (
    Submitter,
    Wanted,
    admitted,
    check_length,
    make_jobs,
    tokenize,
)
from kvscaler_sidecar.server.held import Hold, Lane
from kvscaler_sidecar.server.schema import ChatRequest, CompletionRequest

Events = AsyncIterator[tuple[int, Event]]


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded replica, as the API uses it."""

    engine: Submitter
    text: Tokenizer
    max_context_tokens: int
    executor: ExecutorReport
    unsupported_field: Callable[[SamplingParams], str | None]
    lane: Lane = field(default_factory=Lane)
    """For long texts: rendering and encoding take many times their memory."""

    def check_sampling(self, params: SamplingParams) -> SamplingParams:
        """`params`, unless the executor can't honour them: a field is never ignored silently."""
        unsupported = self.unsupported_field(params)
        if unsupported is not None:
            raise Refusal(
                RefusalReason.UNSUPPORTED_FIELD,
                f"The executor {self.executor.type} of this replica computes no probabilities and "
                f"takes no {unsupported}. Leave it out.",
                param=unsupported,
            )
        return params

    async def encode(self, text: str, param: str) -> list[int]:
        """Token ids of a prompt. One that can't fit the context is refused before it is encoded,
        which would take much more memory than the text."""
        least = self.text.least_tokens(text)
        if least >= self.max_context_tokens:
            raise Refusal(
                RefusalReason.CONTEXT_TOO_LONG,
                f"The prompt has {least} tokens or more; this model's maximum context length is "
                f"{self.max_context_tokens} tokens, with room for at least one output token. "
                "Send a shorter prompt.",
                param=param,
            )
        return await tokenize(self.lane, self.text.encode, text)

    def check_length(self, prompt_tokens: int, output_tokens: int | None, param: str) -> int:
        """`generate.check_length` for this replica."""
        return check_length(
            prompt_tokens,
            output_tokens,
            self.max_context_tokens,
            self.engine.max_request_tokens,
            param,
        )


async def answer(
    exchange: Exchange,
    serving: Serving,
    request: CompletionRequest | ChatRequest,
    wanted: Wanted,
    shape: Shape,
    hold: Hold,
) -> None:
    """Admit the sequences of `wanted` and answer: a stream, or one whole response.

    Raises `Refusal` before anything is sent, and `ClientGone` when the client leaves.
    """
    mailbox = Mailbox(exchange.abort)
    jobs = make_jobs(wanted, mailbox)
    hold.settle(sum(job.held_bytes for job in jobs))
    envelope = {
        "id": wanted.request_id,
        "object": shape.object,
        "created": int(time.time()),
        "model": request.model,
    }
    async with admitted(serving.engine, exchange, jobs, mailbox, hold.release) as events:
        if request.stream:
            envelope["object"] = shape.chunk_object
            stream = _Stream(exchange, envelope, request.include_usage)
            await stream.open([shape.opening(job.index) for job in jobs])
            await _stream(stream, events, shape, len(jobs), wanted.choices)
        else:
            choices, usage = await _collect(events, len(jobs), wanted.choices)
            bodies = [shape.choice(index, choice) for index, choice in enumerate(choices)]
            await exchange.send_json(200, {**envelope, "choices": bodies, "usage": usage.body()})


async def _stream(
    stream: "_Stream", events: Events, shape: Shape, sequences: int, choices_per_prompt: int
) -> None:
    usage = Usage()
    left = sequences
    async for index, event in events:
        if isinstance(event, Produced):
            if event.text or event.logprobs is not None:
                await stream.send([shape.piece(index, event.text, [event])])
        elif isinstance(event, Finished):
            left -= 1
            usage.add(event, first_choice=index % choices_per_prompt == 0)
            if event.reason is FinishReason.ERROR:
                await stream.fail(event.message)
                return
            await stream.send([shape.ending(index, event.text, event.reason)])
            if not left:
                break
    await stream.close(usage)


async def _collect(
    events: Events, sequences: int, choices_per_prompt: int
) -> tuple[list[ChoiceText], Usage]:
    usage = Usage()
    choices = [ChoiceText() for _ in range(sequences)]
    left = sequences
    async for index, event in events:
        choice = choices[index]
        if isinstance(event, Produced):
            choice.parts.append(event.text)
            if event.logprobs is not None:
                choice.tokens.append(event)
        elif isinstance(event, Finished):
            left -= 1
            usage.add(event, first_choice=index % choices_per_prompt == 0)
            if event.reason is FinishReason.ERROR:
                raise _engine_failed(event.message)
            choice.parts.append(event.text)
            choice.reason = event.reason
            if not left:
                break
    return choices, usage


class _Stream:
    """Server-sent events of one response."""

    def __init__(self, exchange: Exchange, envelope: dict[str, Any], usage: bool) -> None:
        self._exchange = exchange
        self._envelope = envelope
        self._usage = usage

    async def open(self, openings: list[dict[str, Any] | None]) -> None:
        headers = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),
        ]
        await self._exchange.start(200, headers)
        for choice in openings:
            if choice is not None:
                await self.send([choice])

    async def send(self, choices: list[dict[str, Any]]) -> None:
        chunk: dict[str, Any] = {**self._envelope, "choices": choices}
        if self._usage:
            chunk["usage"] = None
        await self._write(chunk)

    async def fail(self, message: str) -> None:
        """Tell a client that its stream broke; it can't be told by a status any more."""
        await self._write(error_body(500, message, None, str(RefusalReason.ENGINE_FAILED)))
        await self._exchange.write(b"", more=False)

    async def close(self, usage: Usage) -> None:
        if self._usage:
            await self._write({**self._envelope, "choices": [], "usage": usage.body()})
        await self._exchange.write(b"data: [DONE]\n\n", more=False)

    async def _write(self, payload: dict[str, Any]) -> None:
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        await self._exchange.write(f"data: {text}\n\n".encode())


def _engine_failed(message: str) -> Refusal:
    return Refusal(RefusalReason.ENGINE_FAILED, message, retry_after_seconds=5, counted=True)
