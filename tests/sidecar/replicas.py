"""A replica in the test's own event loop, with an executor whose tokens and pace tests decide.

Server, scheduler, pool and admission are the real ones; only the arithmetic is replaced: the
output repeats the prompt, one byte a token, and byte 0 is the end of sequence.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import StepPlan
from kvscaler.models import catalogue
from kvscaler.protocol.state import ExecutorReport, ExecutorType, ReplicaState, StepCosts
from kvscaler_sidecar.config import Settings, load
from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams, TokenLogprobs
from kvscaler_sidecar.replica import Loaded, Replica
from kvscaler_sidecar.server.listeners import bind
from kvscaler_sidecar.start import plan_start

BLOCK_TOKENS = 4
MODEL = "parrot"


class ByteStream:
    """UTF-8 decoding, a character at a time."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, token_id: int) -> str:
        self._bytes += bytes([token_id])
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError:
            return ""
        self._bytes = b""
        return text

    def finish(self) -> str:
        text = self._bytes.decode(errors="replace")
        self._bytes = b""
        return text


class ByteTokenizer:
    """One token a byte."""

    vocab_size = 256
    eos_token_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // 10_000)  # a loose bound, as real ones are

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace")

    def stream(self, prompt_ids: Sequence[int]) -> ByteStream:
        return ByteStream()

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


@dataclass
class ParrotExecutor:
    """Repeats prompts. A step waits while `gate` is closed; `entered` tells that one does.

    With `closes` each step that the gate lets through closes it behind itself.
    """

    kv_blocks: int = 64
    block_tokens: int = BLOCK_TOKENS
    block_bytes: int = 1024
    weight_bytes: int = 12345
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    closes: bool = False
    explode: bool = False
    known: dict[EngineRequest, SamplingParams] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.pool_bytes = self.kv_blocks * self.block_bytes
        self.report = ExecutorReport(
            type="Parrot", device="cpu", compute_dtype="bytes", kv_dtype="bytes", reason="a test"
        )

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        self.known[request] = params

    def remove(self, request: EngineRequest) -> None:
        self.known.pop(request, None)

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.entered.set()
        self.gate.wait()
        if self.closes:
            self.gate.clear()
        if self.explode:
            raise RuntimeError("the parrot is dead")
        self.steps += 1
        tokens: list[SampledToken] = []
        for chunk in plan.chunks:
            request = chunk.request
            needed = -(-(chunk.start + chunk.length) // self.block_tokens)
            assert len(request.block_table) >= needed, "no block for a token of the chunk"
            if chunk.samples:
                params = self.known[request]
                at = request.generated_tokens % request.prompt_tokens
                token_id = request.token_ids[at]
                logprobs = None
                if params.logprobs is not None:
                    top = tuple((token_id + i, -0.5 - i) for i in range(params.logprobs))
                    logprobs = TokenLogprobs(-0.5, top)
                tokens.append(SampledToken(token_id, logprobs))
        return tokens

    def measure(self) -> StepCosts | None:
        return None


@dataclass
class Served:
    """A process of any mode that serves, and ways to talk to it."""

    task: "asyncio.Task[int]"
    ports: dict[str, int]
    client: httpx.AsyncClient

    def url(self, listener: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[listener]}{path}"

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return await self.client.post(self.url("http", path), content=content, **options)

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def state(self) -> ReplicaState:
        answer = await self.client.get(self.url("metrics", "/state"))
        answer.raise_for_status()
        return ReplicaState.model_validate_json(answer.content)

    async def metrics(self) -> str:
        answer = await self.client.get(self.url("metrics", "/metrics"))
        answer.raise_for_status()
        return answer.text

    async def until(
        self, condition: Callable[[ReplicaState], bool], seconds: float = 20
    ) -> ReplicaState:
        """The first state for which `condition` holds."""
        deadline = time.monotonic() + seconds
        while True:
            state = await self.state()
            if condition(state):
                return state
            assert time.monotonic() < deadline, f"never came to pass; last: {state}"
            await asyncio.sleep(0.01)


@dataclass
class Running(Served):
    """A replica that serves."""

    replica: Replica
    executor: ParrotExecutor
    settings: Settings

    @property
    def inbox(self) -> int:
        """Commands that wait for the engine's thread to end its step."""
        engine = self.replica._engine
        assert engine is not None
        return len(engine._inbox)

    async def stepping(self) -> None:
        """Wait until a step is under way (behind the executor's gate)."""
        await eventually(self.executor.entered.is_set)


async def eventually(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until `condition` holds; looks often, and fails after a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        await asyncio.sleep(0.005)


def model_folder(root: Path) -> Path:
    """A folder with SmolLM2's config, enough to compute a budget from."""
    entry = catalogue.find("builtin://smollm2-135m")
    facts = {name: value for name, value in entry.architecture.facts.items() if value is not None}
    folder = root / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def settings_for(root: Path, **options: Any) -> Settings:
    """Settings of a small replica on free ports."""
    values: dict[str, Any] = {
        "model_uri": str(model_folder(root)),
        "served_names": MODEL,
        "memory_bytes": str(8 << 30),
        "max_context_tokens": "128",
        "block_tokens": str(BLOCK_TOKENS),
        "host": "127.0.0.1",
        "http_port": "0",
        "metrics_port": "0",
        "admin_port": "0",
        "admin_keys_dir": str(root / "keys"),
        "service_uid": "service-1",
        "service_name": "chat",
        "pod_uid": "pod-1",
        "pod_name": "chat-abc",
        "drain_linger_seconds": "0",
        "limits": json.dumps({"charge": "WorstCase", "watermark_percent": 0}),
    }
    values.update({k: v if isinstance(v, str) else json.dumps(v) for k, v in options.items()})
    return load(values, {})


@asynccontextmanager
async def running(
    root: Path,
    executor: ParrotExecutor | None = None,
    *,
    loader: Callable[..., Loaded] | None = None,
    kind: str = "Torch",
    wait_ready: bool = True,
    **options: Any,
) -> AsyncIterator[Running]:
    """A replica of `executor` that is ready, ended and checked for leftovers afterwards.

    `kind` is the executor that its settings name, for a `loader` that makes it from them.
    """
    executor = executor or ParrotExecutor()
    settings = settings_for(root, executor=kind, **options)
    modelled = settings.executor is ExecutorType.MODELLED
    plan = plan_start(settings, "Auto" if modelled else "float32")
    sockets = {name: bind("127.0.0.1", 0) for name in ("http", "metrics", "admin")}
    replica = Replica(
        settings, plan, loader or (lambda *_: Loaded(executor, ByteTokenizer())), sockets
    )
    task = asyncio.create_task(replica.run(install_signals=False))
    async with httpx.AsyncClient(timeout=30) as client:
        me = Running(task, replica.listeners.ports, client, replica, executor, settings)
        if wait_ready:
            await eventually(lambda: replica.ready().ok or task.done())
        try:
            yield me
        finally:
            executor.gate.set()
            replica.begin_end()
    await asyncio.wait_for(task, 20)


async def state_and_metrics_under_load(tmp_path: Path) -> tuple[ReplicaState, str]:
    """`/state` and `/metrics` of one replica that has finished, refused and held requests.

    The engine stands still for both, so that they are of the same moment.
    """
    executor = ParrotExecutor(kv_blocks=24)
    limits = {"charge": "WorstCase", "watermark_percent": 0, "queue_requests": 2}
    async with running(tmp_path, executor, limits=limits) as replica:
        await asyncio.gather(
            *(replica.complete(f"{i:02d}" * 8, max_tokens=20) for i in range(12)),
            replica.complete("x" * 400),
        )
        executor.gate.clear()
        executor.entered.clear()
        held = asyncio.create_task(replica.complete("held", max_tokens=8))
        await replica.stepping()
        state, page = replica.replica.state(), await replica.metrics()
        executor.gate.set()
        await held
    return state, page
