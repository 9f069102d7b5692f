"""Real processes: the command line of a gate, before a second process with our engine in it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.sidecar.test_process import MODEL, Process, start, watched

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvscaler_sidecar", *arguments]


@contextmanager
def gate_before(engine_url: str, metrics_url: str, *flags: str) -> Iterator[Process]:
    popen = subprocess.Popen(
        command(
            *("--mode=gate", f"--engine-url={engine_url}", f"--engine-metrics-url={metrics_url}"),
            *("--host=127.0.0.1", "--http-port=0", "--metrics-port=0", "--admin-port=0"),
            *("--drain-linger-seconds=0", *flags),
        ),
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    process = watched(popen)
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()


def test_a_gate_loads_no_torch_and_says_what_is_wrong_with_its_options() -> None:
    with gate_before("http://127.0.0.1:1", "http://127.0.0.1:1") as gate:
        assert gate.port("http") > 0
        maps = Path(f"/proc/{gate.popen.pid}/maps").read_text()
        gate.popen.send_signal(signal.SIGTERM)
        assert gate.popen.wait(60) == 0
    assert "libtorch" not in maps and "numpy" not in maps
    for flags, words in (
        ((), "--engine-url (or KVSCALER_ENGINE_URL) is required"),
        (("--engine-url=http://10.0.0.1:8001",), "must have a loopback address"),
        (("--engine-url=https://127.0.0.1:8001",), "must be http://ADDRESS:PORT"),
        (("--engine-url=http://127.0.0.1:8001", "--engine-type=VLLM"), "built: Kvscaler"),
        (("--engine-url=http://127.0.0.1:8001", "--model-uri=x"), "unrecognized arguments"),
    ):
        done = subprocess.run(
            command("--mode=gate", *flags), capture_output=True, text=True, env=ENVIRONMENT,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode in (78, 2)
        assert words in done.stderr, flags


def test_the_wait_ends_with_0_when_nobody_is_there_and_with_1_without_a_drain() -> None:
    gone = subprocess.run(
        command("wait-drained", "--url=http://127.0.0.1:1"),
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    assert gone.returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        late = subprocess.run(
            command("wait-drained", f"--url=http://127.0.0.1:{port}", "--timeout-seconds=0.2"),
            capture_output=True, env=ENVIRONMENT, timeout=120, check=False,
        )  # fmt: skip
    assert late.returncode == 1


@pytest.mark.model
async def test_an_engine_on_the_loopback_address_behind_a_gate() -> None:
    """Streams, a refused neighbour address, and an end in the right order."""
    engine = start("--host=127.0.0.1")
    try:
        engine.wait(lambda: engine.event("ready"), "ready")
        ports = [engine.port(name) for name in ("http", "metrics", "admin")]
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with gate_before(urls[0], urls[1]) as gate:
            gate.wait(lambda: gate.event("ready"), "ready")
            await _stream_through_the_end(engine, gate)
    finally:
        engine.popen.kill()
        engine.popen.wait()


async def _stream_through_the_end(engine: Process, gate: Process) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{gate.port('http')}/v1", api_key="none", max_retries=0
    )
    stream = await client.completions.create(
        model=MODEL, prompt="A long story:", max_tokens=80, stream=True,
        extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [await anext(stream)]
    state = gate.state()
    assert state.capacity == engine.state().capacity
    assert state.in_flight.requests == 1
    wait = await asyncio.create_subprocess_exec(
        *command("wait-drained", f"--url=http://127.0.0.1:{gate.port('metrics')}"),
        env=ENVIRONMENT, stdout=subprocess.PIPE,
    )  # fmt: skip
    # What a preStop does: the engine gets its SIGTERM only when the wait is over.
    gate.popen.send_signal(signal.SIGTERM)
    waited = asyncio.create_task(wait.communicate())
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 5:
            assert not waited.done()
    told, _ = await asyncio.wait_for(waited, 60)
    engine.popen.send_signal(signal.SIGTERM)
    await client.close()
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 80
    assert re.search(rb"drained|nothing to wait for|ended", told)
    assert wait.returncode == 0
    assert await asyncio.to_thread(gate.popen.wait, 60) == 0
    assert await asyncio.to_thread(engine.popen.wait, 60) == 0
