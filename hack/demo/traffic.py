"""Open-loop streaming traffic: Poisson arrivals, a connection per request, every body checked.

Open loop, because a closed one slows down with the server and so hides an overload. A connection
per request, because a kept one stays with the Pod that it began on. An answer counts only if its
body is a whole stream: anything can answer a connection.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

WORDS = [
    "river",
    "mountain",
    "village",
    "harvest",
    "engine",
    "signal",
    "market",
    "winter",
    "garden",
    "letter",
    "bridge",
    "copper",
    "planet",
    "teacher",
    "window",
    "morning",
    "paper",
    "stone",
    "music",
    "forest",
    "island",
    "doctor",
    "captain",
    "kitchen",
    "history",
    "weather",
    "machine",
    "student",
    "answer",
    "question",
    "holiday",
    "railway",
    "painter",
    "shadow",
    "summer",
]


class Result(StrEnum):
    """How a request ended, seen from its client."""

    OK = "ok"
    REFUSED = "refused"
    BROKEN = "broken"


@dataclass(slots=True)
class Request:
    """One request and what became of it. Times are seconds on the monotonic clock."""

    phase: str
    offered_at: float
    prompt_words: int
    max_tokens: int
    result: Result | None = None
    status: int | None = None
    reason: str = ""
    first_token_seconds: float | None = None
    token_gaps_seconds: list[float] = field(default_factory=list)
    ended_at: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def as_row(self, start: float) -> dict[str, Any]:
        """A flat row for the report; times relative to `start`."""
        row = asdict(self)
        row["result"] = self.result.value if self.result else None
        row["offered_at"] = round(self.offered_at - start, 3)
        row["ended_at"] = round(self.ended_at - start, 3) if self.ended_at else None
        row["token_gaps_seconds"] = [round(gap, 4) for gap in self.token_gaps_seconds]
        return row


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of requests: uniform between bounds, words for prompts and tokens for outputs."""

    prompt_words: tuple[int, int] = (24, 56)
    output_tokens: tuple[int, int] = (12, 24)

    @property
    def mean_output_tokens(self) -> float:
        """Mean of the asked output length."""
        return sum(self.output_tokens) / 2


def make_prompt(rng: random.Random, words: int) -> str:
    """A prompt of that many words that shares no prefix with another."""
    return "Write about " + " ".join(rng.choice(WORDS) for _ in range(words))


async def send(session: aiohttp.ClientSession, url: str, model: str, request: Request,
               prompt: str, seed: int, timeout_seconds: float,
               ignore_eos: bool = False) -> None:  # fmt: skip
    """Send one streaming completion and fill in `request`; never raises but for cancellation.

    With `ignore_eos` the answer has exactly the tokens that were asked for.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": ignore_eos,
    }
    try:
        async with asyncio.timeout(timeout_seconds):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                request.status = response.status
                if response.status != 200:
                    await _refused(response, request)
                else:
                    await _stream(response, request)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        request.result = Result.BROKEN
        request.reason = f"{type(error).__name__}: {error}"
    request.ended_at = time.monotonic()


async def _refused(response: aiohttp.ClientResponse, request: Request) -> None:
    """A refusal must say so in the product's own words, or it is something else answering."""
    request.reason = response.headers.get("x-kvscaler-reason", "")
    error = json.loads(await response.text()).get("error")
    known = request.status in {429, 503} and request.reason and isinstance(error, dict)
    request.result = Result.REFUSED if known else Result.BROKEN
    if not known:
        request.reason = f"unexpected answer {request.status}: {error!r}"


async def _stream(response: aiohttp.ClientResponse, request: Request) -> None:
    last = None
    finished = done = False
    async for event in _events(response):
        if event == "[DONE]":
            done = True
            break
        chunk = json.loads(event)
        if not isinstance(chunk, dict):
            raise ValueError(f"a chunk of the stream is {event[:80]!r}, not an object")
        if "error" in chunk:
            raise ValueError(f"error in the stream: {chunk['error']}")
        if usage := chunk.get("usage"):
            request.prompt_tokens = usage["prompt_tokens"]
            request.output_tokens = usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            now = time.monotonic()
            if last is None:
                request.first_token_seconds = now - request.offered_at
            else:
                request.token_gaps_seconds.append(now - last)
            last = now
            finished = finished or choice.get("finish_reason") is not None
    if done and finished and request.output_tokens:
        request.result = Result.OK
    else:
        request.result = Result.BROKEN
        request.reason = f"stream ended early (finish reason {finished}, end mark {done})"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        text = line.decode().strip()
        if text.startswith("data:"):
            yield text[5:].strip()


class Traffic:
    """Poisson arrivals whose rate the caller changes; keeps every request it ever offered."""

    def __init__(self, url: str, model: str, shape: Shape, seed: int = 1,
                 request_timeout_seconds: float = 180.0) -> None:  # fmt: skip
        self.url, self.model, self.shape = url, model, shape
        self.requests: list[Request] = []
        self.phase = "idle"
        self.rate_per_second = 0.0
        self._rng = random.Random(seed)
        self._timeout_seconds = request_timeout_seconds
        self._live: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def live(self) -> int:
        """Requests without an end yet."""
        return len(self._live)

    def set_phase(self, phase: str, rate_per_second: float) -> None:
        """Name the phase and set its arrival rate, from now on."""
        self.phase, self.rate_per_second = phase, rate_per_second
        self._changed.set()

    async def run(self, on_offer: Callable[[Request], None] | None = None) -> None:
        """Offer requests until cancelled; then wait for no one (see `drain`)."""
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, connect=30)
        ) as session:
            try:
                due = time.monotonic()
                while True:
                    if self._changed.is_set():
                        self._changed.clear()
                        due = time.monotonic()
                        if self.rate_per_second > 0:
                            due += self._rng.expovariate(self.rate_per_second)
                    if self.rate_per_second <= 0:
                        await self._changed.wait()
                        continue
                    # Not wait_for: in Python 3.11 it loses a cancellation that meets the event.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, due - time.monotonic())):
                            await self._changed.wait()
                        continue
                    self._offer(session, due, on_offer)
                    due += self._rng.expovariate(self.rate_per_second)
            finally:
                await self.drain()

    def _offer(self, session: aiohttp.ClientSession, due: float,
               on_offer: Callable[[Request], None] | None) -> None:  # fmt: skip
        words = self._rng.randint(*self.shape.prompt_words)
        request = Request(self.phase, due, words, self._rng.randint(*self.shape.output_tokens))
        self.requests.append(request)
        if on_offer is not None:
            on_offer(request)
        prompt, seed = make_prompt(self._rng, words), self._rng.randrange(1 << 31)
        task = asyncio.create_task(
            send(session, self.url, self.model, request, prompt, seed, self._timeout_seconds)
        )
        self._live.add(task)
        task.add_done_callback(self._live.discard)

    async def abandon(self) -> None:
        """Give up every request that has no end yet; those keep no result."""
        live = set(self._live)
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)

    async def drain(self) -> None:
        """Wait for every request that was offered."""
        while self._live:
            await asyncio.wait(set(self._live))


async def saturate(url: str, model: str, shape: Shape, concurrency: int, seconds: float,
                   seed: int = 7) -> list[Request]:  # fmt: skip
    """Closed loop: `concurrency` requests at any time for `seconds`, to measure a top speed.

    Requests that are still running at the end are cancelled and not in the result.
    """
    rng = random.Random(seed)
    done: list[Request] = []
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, connect=30)
    ) as session:

        async def worker() -> None:
            while True:
                words = rng.randint(*shape.prompt_words)
                request = Request("measure", time.monotonic(), words,
                                  rng.randint(*shape.output_tokens))  # fmt: skip
                prompt = make_prompt(rng, words)
                await send(session, url, model, request, prompt, rng.randrange(1 << 31), 180.0)
                done.append(request)
                if request.result is not Result.OK:
                    await asyncio.sleep(0.5)

        workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
        try:
            await asyncio.sleep(seconds)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return done
