"""Sidecars for tests: a real HTTP server for one Pod, whose state and faults a test sets."""

import asyncio
import contextlib
import json
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from kvscaler.protocol import tokens
from kvscaler.protocol.drain import DrainPhase, DrainPut, DrainReport
from kvscaler.protocol.limits import AdmissionLimits, LimitsPut, LimitsReport
from kvscaler.protocol.state import (
    CapacityReport,
    ExecutorReport,
    ModelReport,
    OccupancyReport,
    ReplicaState,
    StepCosts,
    TrafficCounters,
)

BLOCKS = 200
CLAMPED = ("kv_blocks", "max_sequences", "step_tokens", "max_request_tokens")

OWN_LIMITS = AdmissionLimits(
    max_sequences=64,
    kv_blocks=BLOCKS,
    step_tokens=512,
    queue_requests=1,
    queue_tokens=1000,
    queue_bytes=1000,
    max_wait_seconds=1.0,
    max_request_tokens=2048,
    watermark_blocks=1,
)


def make_state(service_uid: str, pod_uid: str, pod_name: str, **changes: Any) -> ReplicaState:
    """A ready, idle replica of SmolLM2-135M with 200 blocks."""
    now = time.time()
    values: dict[str, Any] = {
        "service_uid": service_uid,
        "service_name": "chat",
        "pod_uid": pod_uid,
        "pod_name": pod_name,
        "started_at": now - 1.0,
        "observed_at": now,
        "ready": True,
        "executor": ExecutorReport(
            type="Torch", device="cpu", compute_dtype="float32", kv_dtype="float32"
        ),
        "model": ModelReport(uri="builtin://smollm2-135m", served_names=("chat",), digest="d"),
        "capacity": CapacityReport(
            kv_blocks=BLOCKS,
            block_tokens=16,
            block_bytes=737_280,
            pool_bytes=BLOCKS * 737_280,
            predicted_kv_blocks=BLOCKS,
            predicted_pool_bytes=BLOCKS * 737_280,
            weight_bytes=538_060_032,
            predicted_weight_bytes=538_060_032,
            max_sequences=64,
            max_context_tokens=2048,
        ),
        "occupancy": OccupancyReport(
            capacity_blocks=BLOCKS,
            referenced_blocks=0,
            reserved_blocks=0,
            cached_blocks=0,
            free_blocks=BLOCKS,
            running_requests=0,
            waiting_requests=0,
            waiting_tokens=0,
        ),
        "step_costs": StepCosts(
            base_seconds=0.01,
            per_sequence_seconds=0.001,
            per_context_token_seconds=1e-6,
            per_prefill_token_seconds=1e-4,
        ),
        "traffic": TrafficCounters(),
    }
    values.update(changes)
    return ReplicaState(**values)


class FakeSidecar:
    """One Pod's sidecar on its own loopback address."""

    def __init__(
        self, ip: str, state_port: int, admin_port: int, public_key: Ed25519PublicKey | None
    ) -> None:
        self.ip = ip
        self.state_port = state_port
        self.admin_port = admin_port
        self._public_key = public_key
        self.state: ReplicaState | None = None
        self.limits = LimitsReport(
            hash=OWN_LIMITS.content_hash, applied=OWN_LIMITS, own_hash=OWN_LIMITS.content_hash
        )
        self.drain = DrainReport()
        self.live_when_drained = 1
        """Requests that it has at least when it is told to drain: those of nobody in particular."""
        self.limits_puts: list[AdmissionLimits] = []
        self.drain_puts: list[bool] = []
        self.raw: bytes | None = None
        self.raw_headers: dict[str, str] = {}
        """Sent instead of the state, if set."""
        self.hang = False
        self.redirect = False
        self.status = 200
        self.endless = False
        """A body that goes on to 1 GB."""
        self.asked = 0
        self.most_bytes_sent = 0
        """Of the endless body, in one answer."""
        self.clock_seconds = 0.0
        """How far this replica's clock is ahead."""
        self.physical: AdmissionLimits | None = None
        """What limits are lowered to, as a replica does that has less than it is asked for."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on both ports."""
        application = web.Application()
        application.router.add_get("/state", self._state)
        application.router.add_put(tokens.LIMITS_PATH, self._put_limits)
        application.router.add_put(tokens.DRAIN_PATH, self._put_drain)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        for port in {self.state_port, self.admin_port}:
            await web.TCPSite(self._runner, self.ip, port, reuse_address=True).start()

    async def stop(self) -> None:
        """Stop listening, as a Pod that is gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def set(self, **changes: Any) -> None:
        """Change the state that is reported."""
        assert self.state is not None
        self.state = self.state.model_copy(update=changes)

    def report(self) -> ReplicaState:
        """The state as the replica tells it now, by its own clock."""
        assert self.state is not None
        return self.state.model_copy(
            update={
                "observed_at": time.time() + self.clock_seconds,
                "limits": self.limits,
                "drain": self.drain,
            }
        )

    async def _state(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.hang:
            await asyncio.sleep(30)
        if self.redirect:
            raise web.HTTPFound("http://127.0.0.1:1/")
        if self.status != 200:
            return web.Response(status=self.status, text="no such page")
        if self.endless:
            return await self._gigabyte(request)
        if self.raw is not None:
            headers = {"Content-Type": "application/json", **self.raw_headers}
            return web.Response(body=self.raw, headers=headers)
        if self.state is None:
            raise web.HTTPServiceUnavailable
        return web.Response(text=self.report().model_dump_json(), content_type="application/json")

    async def _gigabyte(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for megabytes in range(1, 1025):
                await response.write(b" " * (1 << 20))
                self.most_bytes_sent = max(self.most_bytes_sent, megabytes << 20)
        return response

    async def _put_limits(self, request: web.Request) -> web.Response:
        put = LimitsPut.model_validate(await self._verified(request))
        if put.if_hash not in (None, self.limits.hash):
            return web.Response(status=409, text="hash moved")
        self.limits_puts.append(put.limits)
        has = self.physical or put.limits
        lowered = [n for n in CLAMPED if getattr(put.limits, n) > getattr(has, n)]
        applied = put.limits.model_copy(update={n: getattr(has, n) for n in lowered})
        self.limits = self.limits.model_copy(
            update={
                "hash": applied.content_hash,
                "applied": applied,
                "requested_hash": put.limits.content_hash,
                "clamped": tuple(lowered),
            }
        )
        return web.Response(text=self.limits.model_dump_json(), content_type="application/json")

    async def _put_drain(self, request: web.Request) -> web.Response:
        put = DrainPut.model_validate(await self._verified(request))
        self.drain_puts.append(put.drain)
        live = self.drain.live_requests
        if put.drain and self.drain.phase is DrainPhase.SERVING:
            live = max(live, self.live_when_drained)
            phase = DrainPhase.DRAINING if live else DrainPhase.EMPTY
            self.drain = DrainReport(
                phase=phase, since=time.time(), live_requests=live, reason="admin"
            )
        elif not put.drain:
            # Its requests go on.
            self.drain = DrainReport(live_requests=live)
        return web.Response(text=self.drain.model_dump_json(), content_type="application/json")

    async def _verified(self, request: web.Request) -> Any:
        body = await request.read()
        assert self.state is not None
        if self._public_key is not None:
            token = request.headers["Authorization"].removeprefix("Bearer ")
            if abs(self.clock_seconds) > tokens.CLOCK_SKEW_SECONDS:
                raise web.HTTPUnauthorized(text='{"error": {"reason": "TokenInvalid"}}')
            claims = jwt.decode(
                token,
                self._public_key,
                algorithms=[tokens.ALGORITHM],
                audience=tokens.audience(self.state.service_uid, self.state.pod_uid),
                issuer=tokens.ISSUER,
            )
            assert claims["htm"] == request.method
            assert claims["htu"] == request.path
            assert claims["bsh"] == tokens.body_hash(body)
            assert claims["scope"] == tokens.required_scope(request.method, request.path)
        return json.loads(body)
