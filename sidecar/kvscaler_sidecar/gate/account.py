"""The books of one charged request: what is seen of its answer, told to admission and metrics."""

import time
from collections import Counter
from typing import Protocol

from kvscaler.engine.gated import GatedRequest
from kvscaler.engine.request import FinishReason
from kvscaler.engine.token_estimate import WORST_CASE_BASES
from kvscaler.protocol.refusals import REASON_HEADER, RefusalReason

from kvscaler_sidecar.gate.charge import Charge
from kvscaler_sidecar.gate.desk import Desk
from kvscaler_sidecar.gate.headers import value_of
from kvscaler_sidecar.gate.meter import Meter
from kvscaler_sidecar.gate.upstream import Answer
from kvscaler_sidecar.metrics import Latencies


class GateCounts:
    """What only a gate counts."""

    def __init__(self) -> None:
        self.charges: Counter[str] = Counter()
        """Requests by the basis of their charge."""
        self.broken = 0
        """Answers that the engine broke off after their first byte."""
        self.unmeasured = 0
        """Answers of charged requests whose lengths nobody told."""


class Books(Protocol):
    """What is written to besides admission."""

    counts: GateCounts
    latencies: Latencies


class Account:
    """Of one request that was admitted."""

    def __init__(
        self, books: Books, desk: Desk, path: str, charged: Charge, gated: GatedRequest
    ) -> None:
        self._books, self._desk, self._path = books, desk, path
        self._charged, self._gated = charged, gated
        self._meter = Meter(None, None)
        self._over = False
        self._seen_tokens = 0
        self._last_seen = 0.0

    def begin(self, answer: Answer) -> None:
        """The head is there. An answer that refuses holds no blocks: its charge ends here."""
        engine, gated = self._desk.engine, self._gated
        if answer.status >= 400:
            self._over = True
            reason = _reason(answer)
            if reason is None and answer.status >= 500:
                engine.abort(gated, FinishReason.ERROR)
            else:
                engine.turn_away(gated, reason or RefusalReason.ENGINE_REFUSED)
            self._desk.pump()
            return
        self._meter = Meter(
            value_of(answer.headers, b"content-type"),
            value_of(answer.headers, b"content-encoding"),
        )
        for sequence in gated.sequences:
            sequence.streams = self._meter.streams

    def feed(self, data: bytes) -> None:
        """A part of the body passes."""
        if self._over:
            return
        meter = self._meter
        meter.feed(data)
        told = meter.usage.output_tokens if meter.usage is not None else None
        seen = max(meter.output_tokens, told or 0)
        if meter.streams and seen > self._seen_tokens:
            now = time.monotonic()
            if self._seen_tokens:
                fresh = seen - self._seen_tokens
                for _ in range(min(fresh, 1000)):
                    self._books.latencies.inter_token.observe((now - self._last_seen) / fresh)
            self._seen_tokens, self._last_seen = seen, now
            self._desk.engine.progress(self._gated, seen, now)

    def refused(self, reason: RefusalReason) -> None:
        """The engine gave no answer, and the client is told so."""
        if not self._over:
            self._over = True
            self._desk.engine.turn_away(self._gated, reason)

    def broke(self) -> None:
        """The engine broke the answer off."""
        if not self._over:
            self._over = True
            self._desk.engine.abort(self._gated, FinishReason.ERROR)

    def end(self) -> None:
        """The answer is complete."""
        if self._over:
            return
        self._over = True
        engine, gated, meter, latencies = (
            self._desk.engine, self._gated, self._meter, self._books.latencies
        )  # fmt: skip
        meter.end()
        if meter.failed:
            engine.abort(gated, FinishReason.ERROR)
            return
        prompt = meter.usage.prompt_tokens if meter.usage is not None else None
        output = meter.usage.output_tokens if meter.usage is not None else None
        now = time.monotonic()
        if prompt:
            engine.correct_prompt(gated, prompt)
            if self._charged.text_bytes is not None:
                self._desk.learned(self._path).observe(self._charged.text_bytes, prompt)
        elif self._charged.basis in WORST_CASE_BASES:
            engine.forget(gated)
            self._books.counts.unmeasured += 1
            return
        if not engine.finish(gated, now, output):
            self._books.counts.unmeasured += 1
            return
        for sequence in gated.sequences:
            latencies.end_to_end.observe(now - sequence.arrival_seconds)
            latencies.output_length.observe(sequence.generated_tokens)


def _reason(answer: Answer) -> RefusalReason | None:
    """The reason that an engine of ours gives for its refusal."""
    named = value_of(answer.headers, REASON_HEADER.encode())
    try:
        return RefusalReason(named.decode("latin-1")) if named is not None else None
    except ValueError:
        return None
