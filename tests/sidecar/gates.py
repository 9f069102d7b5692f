"""A gate in the test's own event loop, before an engine of ours or one that a test scripts.

The gate is the real one. An engine of ours is `replicas.running`; a scripted one is a socket on
which a test sends whatever bytes it likes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kvscaler.budget import AdmissionPolicy
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy, LimitsReport
from kvscaler.protocol.state import (
    CapacityReport,
    ExecutorReport,
    ModelReport,
    OccupancyReport,
    ReplicaState,
)
from kvscaler_sidecar.config import GateSettings, load_table
from kvscaler_sidecar.gate.adapters import adapter_for
from kvscaler_sidecar.gate.process import Gate
from kvscaler_sidecar.server.listeners import bind

from tests.sidecar.replicas import Running, Served, eventually

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WORST_CASE = AdmissionPolicy(charge=ChargePolicy.WORST_CASE, watermark_percent=0)


@dataclass
class Gated(Served):
    """A gate that serves."""

    gate: Gate

    @property
    def desk(self) -> Any:
        assert self.gate._desk is not None
        return self.gate._desk


@asynccontextmanager
async def gated(
    engine_url: str,
    metrics_url: str,
    *,
    policy: AdmissionPolicy = WORST_CASE,
    overrides: dict[str, Any] | None = None,
    wait_ready: bool = True,
    **options: str,
) -> AsyncIterator[Gated]:
    """A gate before the engine at `engine_url`, ended and checked for leftovers afterwards."""
    values = {
        "engine_url": engine_url,
        "engine_metrics_url": metrics_url,
        "host": "127.0.0.1",
        "service_uid": "service-1",
        "service_name": "chat",
        "pod_uid": "pod-1",
        "pod_name": "chat-abc",
        "drain_linger_seconds": "0",
        **options,
    }
    settings = load_table(GateSettings, values, {})
    sockets = {name: bind("127.0.0.1", 0) for name in ("http", "metrics", "admin")}
    gate = Gate(settings, adapter_for("Kvscaler"), policy, overrides or {}, sockets)
    task = asyncio.create_task(gate.run(install_signals=False))
    async with httpx.AsyncClient(timeout=30) as client:
        me = Gated(task, gate.listeners.ports, client, gate)
        if wait_ready:
            await eventually(lambda: gate.ready().ok or task.done())
        try:
            yield me
        finally:
            gate.begin_end()
    await asyncio.wait_for(task, 20)


def before(engine: Running, **options: Any) -> Any:
    """A gate before an engine of ours."""
    return gated(engine.url("http", ""), engine.url("metrics", ""), **options)


@dataclass
class ScriptedEngine:
    """A socket whose answers a test writes; its pages say what a small engine would."""

    url: str
    pages_url: str
    requests: list[bytes] = field(default_factory=list)
    """Heads as they came, to the byte."""
    open: int = 0
    """Connections that are open."""
    opened: int = 0
    state: ReplicaState | None = None
    pages_status: bytes = b"200 OK"


def small_state(
    kv_blocks: int = 64, block_tokens: int = 4, started_at: float = 1.0
) -> ReplicaState:
    """What a ready and idle engine with so many blocks says."""
    limits = AdmissionLimits(
        max_sequences=16, kv_blocks=kv_blocks, step_tokens=512, queue_requests=256,
        queue_tokens=4096, queue_bytes=1 << 20, max_wait_seconds=30, max_request_tokens=128,
        watermark_blocks=0,
    )  # fmt: skip
    return ReplicaState(
        service_uid="e", service_name="e", pod_uid="e", pod_name="e",
        started_at=started_at, observed_at=2.0, ready=True,
        executor=ExecutorReport(type="Scripted", device="d", compute_dtype="c", kv_dtype="k"),
        model=ModelReport(uri="u", served_names=("parrot",), digest="d"),
        capacity=CapacityReport(
            kv_blocks=kv_blocks, block_tokens=block_tokens, block_bytes=1, pool_bytes=kv_blocks,
            predicted_kv_blocks=kv_blocks, predicted_pool_bytes=kv_blocks, weight_bytes=1,
            predicted_weight_bytes=1, max_sequences=16, max_context_tokens=128,
        ),
        occupancy=OccupancyReport(
            capacity_blocks=kv_blocks, referenced_blocks=0, reserved_blocks=0, cached_blocks=0,
            free_blocks=kv_blocks, running_requests=0, waiting_requests=0, waiting_tokens=0,
        ),
        limits=LimitsReport(
            hash=limits.content_hash, applied=limits, own_hash=limits.content_hash
        ),
    )  # fmt: skip


@asynccontextmanager
async def scripted(script: Script, **state: Any) -> AsyncIterator[ScriptedEngine]:
    """An engine that answers each request on a connection by `script`.

    The head of the request is read before; the script reads the body if it wants it. When it
    returns, the next request of the connection is awaited, unless it closed it.
    """
    engine = ScriptedEngine("", "", state=small_state(**state))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.open += 1
        engine.opened += 1
        try:
            while not writer.is_closing():
                engine.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            engine.open -= 1
            writer.close()

    async def pages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                assert engine.state is not None
                page = engine.state.model_dump_json().encode()
                writer.write(
                    b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s"
                    % (engine.pages_status, len(page), page)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    servers = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (serve, pages)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    engine.url, engine.pages_url = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        yield engine
    finally:
        for server in servers:
            server.close()


async def body_of(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """A body with a Content-Length."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return await reader.readexactly(int(value))
    return b""


def answers(raw: bytes) -> Script:
    """A script that reads a request and sends `raw`."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return script


async def exchange(port: int, request: bytes) -> bytes:
    """Everything that comes back on a connection of its own until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def post(body: bytes, path: str = "/v1/completions", extra: str = "", close: bool = True) -> bytes:
    """A raw POST."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{extra}"
    return (head + ("Connection: close\r\n" if close else "") + "\r\n").encode() + body


def keys_folder(root: Path) -> Path:
    """Where a gate of a test looks for admin keys."""
    folder = root / "keys"
    folder.mkdir(exist_ok=True)
    return folder
