"""Who may pass to the engine now: the core's admission, and the wait for it.

It exists from the moment that the engine has said how large its pool is; before that nothing can
be admitted, since nobody knows what fits. Everything runs in the HTTP loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvscaler.budget import AdmissionPolicy, Footprint, limits_over_pool
from kvscaler.engine.gated import EngineCapacity, GatedEngine, GatedRequest
from kvscaler.engine.token_estimate import LearnedTokens
from kvscaler.protocol.limits import AdmissionLimits, LimitsPut, LimitsReport

from kvscaler_sidecar.admin.limits import LimitsInForce
from kvscaler_sidecar.gate.charge import Asked, Charge, Work, charge
from kvscaler_sidecar.server.errors import Refusal, refusal_by_admission
from kvscaler_sidecar.server.exchange import ClientGone, Exchange
from kvscaler_sidecar.server.generate import check_sequences, new_request_id

log = logging.getLogger(__name__)


class Desk:
    """Admission of one engine."""

    def __init__(
        self, capacity: EngineCapacity, policy: AdmissionPolicy, overrides: dict[str, Any]
    ) -> None:
        self._policy, self._overrides = policy, overrides
        self.capacity = capacity
        self._limits = LimitsInForce(self._own_limits())
        self.engine = GatedEngine(
            self._limits.applied, capacity.kv_blocks, Footprint(capacity.block_tokens).blocks
        )
        self._waiting: dict[GatedRequest, asyncio.Future[Refusal | None]] = {}
        self._learned: dict[str, LearnedTokens] = {}

    def _own_limits(self) -> AdmissionLimits:
        capacity = self.capacity
        limits = limits_over_pool(
            self._policy,
            kv_blocks=capacity.kv_blocks,
            block_tokens=capacity.block_tokens,
            max_sequences=capacity.max_sequences,
            step_tokens=capacity.step_tokens,
            max_context_tokens=capacity.max_context_tokens,
        )
        return limits.model_copy(update=self._overrides)

    def engine_has(self, capacity: EngineCapacity) -> None:
        """The engine came back with another pool: begin again with the limits that it implies."""
        if capacity == self.capacity:
            return
        log.warning("the engine's pool changed", extra={"kv_blocks": capacity.kv_blocks})
        self.capacity = capacity
        self.engine.set_capacity(capacity.kv_blocks, Footprint(capacity.block_tokens).blocks)
        self._limits = LimitsInForce(self._own_limits())
        self.engine.set_limits(self._limits.applied)

    # Limits

    def limits_report(self) -> LimitsReport:
        """The limits in force."""
        return self._limits.report(self.engine.pending_kv_blocks)

    def put_limits(self, message: LimitsPut) -> LimitsReport:
        """Apply other limits; raises `HashConflict`."""
        self.engine.set_limits(self._limits.put(message))
        self.pump()
        return self.limits_report()

    # Requests

    def charge(
        self, path: str, asked: Asked, work: Work, default_output_tokens: int | None
    ) -> Charge:
        """What a request is charged."""
        return charge(
            asked,
            work,
            self.learned(path),
            default_output_tokens=default_output_tokens,
            worst_case_tokens=self.engine.worst_case_tokens,
        )

    def learned(self, path: str) -> LearnedTokens:
        """What is known of texts that come to `path`, one of the few that are known."""
        return self._learned.setdefault(path, LearnedTokens())

    @asynccontextmanager
    async def admitted(
        self, exchange: Exchange, charged: Charge, body_bytes: int, *, body_read: bool
    ) -> AsyncIterator[GatedRequest]:
        """The request, once it is admitted; whatever is left of it at the end is aborted.

        Raises `Refusal`, and `ClientGone` when the client leaves while it waits, which only shows
        once the body is read.
        """
        check_sequences(len(charged.prompts), charged.choices)
        gated = self.engine.request(
            new_request_id("gate"),
            charged.prompts,
            charged.max_new_tokens,
            charged.choices,
            time.monotonic(),
            streams=charged.streams,
        )
        refused = self.engine.offer(gated, time.monotonic(), body_bytes)
        if refused is not None:
            raise refusal_by_admission(refused)
        try:
            if not gated.admitted:
                await self._wait(exchange if body_read else None, gated)
            self.engine.forwarded(gated, time.monotonic())
            yield gated
        finally:
            self.engine.abort(gated)
            self.pump()

    async def _wait(self, exchange: Exchange | None, gated: GatedRequest) -> None:
        answer: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._waiting[gated] = answer
        self.pump()
        waits: set[asyncio.Future[Any]] = {answer}
        if exchange is not None:
            waits.add(exchange.watch_disconnect())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientGone
            refusal = answer.result()
            if refusal is not None:
                raise refusal
        finally:
            del self._waiting[gated]

    def pump(self) -> None:
        """Let in what fits now."""
        for gated in self.engine.pump(time.monotonic()):
            self._tell(gated, None)

    def tick(self) -> None:
        """What time alone changes: answers that can't be watched, and waits that are too long."""
        now = time.monotonic()
        self.engine.tick(now)
        for gated, refused in self.engine.expire(now):
            self._tell(gated, refusal_by_admission(refused))
        if self._waiting:
            self.pump()

    def _tell(self, gated: GatedRequest, refusal: Refusal | None) -> None:
        answer = self._waiting.get(gated)
        if answer is not None and not answer.done():
            answer.set_result(refusal)
