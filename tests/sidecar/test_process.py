"""The real process with the real model: official clients, a drain by SIGTERM, exit codes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from kvscaler.protocol.state import ReplicaState
from kvscaler_sidecar.weights import builtin

MODEL = "smollm2-135m"
START_SECONDS = 240

pytestmark = pytest.mark.model


@dataclass
class Process:
    """A sidecar in a process of its own, and its log."""

    popen: "subprocess.Popen[str]"
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read_log(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def event(self, message: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["message"] == message), None)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.popen.poll() is None, f"ended while waiting for {what}: {self.lines}"
            assert time.monotonic() < deadline, f"no {what}: {self.lines}"
            time.sleep(0.05)
        return found

    def port(self, name: str) -> int:
        return int(self.wait(lambda: self.event("listening"), "listening")[name])

    def state(self) -> ReplicaState:
        url = f"http://127.0.0.1:{self.port('metrics')}/state"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return ReplicaState.model_validate_json(answer.read())


def start(*flags: str) -> Process:
    folder = builtin.ensure(f"builtin://{MODEL}")
    popen = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvscaler_sidecar.main", "serve"),
            f"--model-uri=builtin://{MODEL}",
            f"--models-dir={folder.parent}",
            f"--memory-bytes={1700 << 20}",
            "--max-context-tokens=512",
            "--host=127.0.0.1",
            "--http-port=0",
            "--metrics-port=0",
            "--admin-port=0",
            "--drain-linger-seconds=0",
            "--threads=1",
            *flags,
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return watched(popen)


def watched(popen: "subprocess.Popen[str]") -> Process:
    """A process whose log is read as it comes."""
    process = Process(popen)
    threading.Thread(target=process.read_log, daemon=True).start()
    return process


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    made = start()
    try:
        made.wait(lambda: made.event("ready"), "ready")
        yield made
    finally:
        made.popen.kill()
        made.popen.wait()


@pytest.fixture
def client(process: Process) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{process.port('http')}/v1", api_key="none", timeout=120
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_greedy_text_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = client.completions.create(**options)
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    stream = client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_chat_with_logprobs_stop_and_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France? One word."},
        ],
        max_completion_tokens=12,
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=3,
        user="someone",
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] == texts[1]
    assert texts[0] is not None and "Paris" in texts[0]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in logprobs.content)


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=1, seed=seed
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


async def test_async_streams_run_together(process: Process) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{process.port('http')}/v1", api_key="none", timeout=120
    )

    async def one(number: int) -> int:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count to {number}."}],
            max_tokens=10,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
        assert usage is not None
        return int(usage.completion_tokens)

    assert await asyncio.gather(*(one(n) for n in range(3, 7))) == [10] * 4


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served: smollm2-135m"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.APIStatusError, match="maximum context length is 512") as caught:
        client.completions.create(model=MODEL, prompt="word " * 600)
    assert caught.value.status_code == 413


def test_what_was_predicted_is_what_was_allocated(process: Process) -> None:
    state = process.state()
    assert state.executor.type == "Torch"
    assert state.executor.threads == 1
    assert state.capacity is not None
    assert state.capacity.kv_blocks == state.capacity.predicted_kv_blocks
    assert state.capacity.pool_bytes == state.capacity.predicted_pool_bytes
    assert state.capacity.weight_bytes == state.capacity.predicted_weight_bytes
    assert state.step_costs is not None and state.step_costs.base_seconds > 0
    assert state.limits is not None
    assert state.limits.applied.kv_blocks == state.capacity.kv_blocks


def test_sigterm_finishes_the_stream_and_exits_0(process: Process, client: openai.OpenAI) -> None:
    """The last test of this process."""
    stream = client.completions.create(
        model=MODEL,
        prompt="A long story:",
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    chunks = iter(stream)
    first = next(chunks)
    process.popen.send_signal(signal.SIGTERM)
    process.wait(lambda: process.event("SIGTERM: draining"), "draining")
    process.popen.send_signal(signal.SIGTERM)
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=0).completions.create(model=MODEL, prompt="x")
    rest = list(chunks)
    assert caught.value.response.headers["x-kvscaler-reason"] == "Draining"
    assert first.choices[0].text
    assert rest[-1].usage is not None and rest[-1].usage.completion_tokens == 60
    assert process.popen.wait(60) == 0


def test_sigterm_while_loading_exits_0(tmp_path: Path) -> None:
    process = start()
    try:
        process.wait(lambda: process.event("listening"), "listening")
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
    finally:
        process.popen.kill()
        process.popen.wait()
