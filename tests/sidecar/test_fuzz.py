"""Whatever comes in is answered with a status of ours or cut, and leaves nothing behind.

One replica takes all examples, over raw sockets: bodies that are JSON, nearly JSON or nothing of
the kind, in framings right and wrong. `KVSCALER_FUZZ_EXAMPLES` makes the search longer.
"""

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kvscaler.protocol.refusals import STATUS_OF

from tests.sidecar.replicas import MODEL, ParrotExecutor, Running, running

EXAMPLES = int(os.environ.get("KVSCALER_FUZZ_EXAMPLES", "100"))
STATUSES = {200, 405, 431, *STATUS_OF.values()}
PATHS = ("/v1/completions", "/v1/chat/completions")
ANSWER_SECONDS = 20.0


class Faults(logging.Handler):
    """What was logged as an error: none of it is a client's to cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.name}: {record.getMessage()} {record.exc_info or ''}")


@dataclass
class Target:
    """The replica, in a thread with a loop of its own."""

    running: Running
    faults: Faults = field(default_factory=Faults)

    def talk(self, sent: bytes, *, whole: bool = True, listener: str = "http") -> bytes:
        """What comes back to `sent`. Only what is `whole` must be answered, and closed after."""
        with socket.create_connection(("127.0.0.1", self.running.ports[listener])) as client:
            client.settimeout(ANSWER_SECONDS if whole else 0.05)
            got = b""
            try:
                client.sendall(sent)
                while more := client.recv(65536):
                    got += more
            except ConnectionError:
                pass  # closed before it had read all
            except TimeoutError:
                assert not whole, f"no end after {ANSWER_SECONDS} s; so far {got[:300]!r}"
        return got

    def clean(self) -> None:
        """Nothing is left of what was sent, and nothing went wrong inside."""
        replica = self.running.replica
        deadline = time.monotonic() + ANSWER_SECONDS
        while (
            replica._door.live_requests
            or replica._api.intake.held.bytes
            or self.running.executor.known
        ):
            assert time.monotonic() < deadline, (
                f"left: {replica._door.live_requests} requests, {replica._api.intake.held.bytes} bytes"
            )
            time.sleep(0.001)
        assert self.faults.seen == []

    def blocks_are_free(self) -> None:
        """Every block of the pool can be taken."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            use = self.running.replica.state().occupancy
            assert use is not None
            if use.free_blocks + use.cached_blocks == use.capacity_blocks:
                return
            assert time.monotonic() < deadline, use
            time.sleep(0.01)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    ready: Future[Target] = Future()
    done = threading.Event()

    async def live(root: Path) -> None:
        try:
            async with running(root, ParrotExecutor(kv_blocks=256)) as replica:
                ready.set_result(Target(replica))
                while not done.is_set():
                    await asyncio.sleep(0.01)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(live(tmp_path_factory.mktemp("fuzz"))))
    thread.start()
    try:
        found = ready.result(60)
        logging.getLogger().addHandler(found.faults)
        yield found
        found.blocks_are_free()
    finally:
        logging.getLogger().removeHandler(found.faults)
        done.set()
        thread.join(60)
    assert not thread.is_alive()


def judge(answer: bytes) -> list[int]:
    """The statuses of all responses; each refusal has OpenAI's error object."""
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    statuses = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    assert set(statuses) <= STATUSES, answer[:500]
    _, _, body = answer.partition(b"\r\n\r\n")
    if len(statuses) == 1 and statuses[0] >= 400 and body:  # that of HEAD has none
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert len(body) < 2000
    assert b"EngineFailed" not in answer
    return statuses


numbers = st.one_of(
    st.integers(-5, 200),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0, 0.5, 1e-320]),
    st.floats(),
)
texts = st.one_of(st.text(max_size=40), st.text(st.characters(categories=["Cs", "Cc"]), max_size=5))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
FIELDS = (
    *("model", "prompt", "messages", "stream", "stream_options", "n", "temperature", "top_p"),
    *("top_k", "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "max_tokens"),
    *("cache_salt", "logprobs", "top_logprobs", "max_completion_tokens", "tools", "logit_bias"),
    *("response_format", "user", "metadata", "echo", "best_of", "suffix", "unknown"),
)
good = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "n": st.integers(1, 130),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 100),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.one_of(texts, st.lists(texts, max_size=3)),
        "max_tokens": st.integers(1, 130),
        "ignore_eos": st.booleans(),
        "cache_salt": texts,
        "logprobs": st.one_of(st.booleans(), st.integers(0, 20)),
        "top_logprobs": st.integers(0, 20),
    },
)
prompts = st.one_of(
    texts,
    st.lists(texts, max_size=4),
    st.lists(st.integers(0, 300), max_size=140),
    st.lists(st.lists(st.integers(0, 255), max_size=20), max_size=4),
    values,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool", "assistant"]), "content": texts},
        optional={"name": texts, "x": values},
    ),
    max_size=4,
)
requests = st.builds(
    lambda base, wrong, prompt, chat: {
        "model": MODEL,
        **base,
        **({"messages": chat} if chat is not None else {"prompt": prompt}),
        **wrong,
    },
    good,
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(FIELDS), values, max_size=2)),
    prompts,
    st.one_of(st.none(), messages),
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A request as JSON, whole or damaged; or something else."""
    request: Any = draw(st.one_of(requests, requests, requests, values))
    text = json.dumps(request, ensure_ascii=draw(st.booleans()))
    data = text.encode("utf-8", "surrogatepass")
    match draw(st.integers(0, 11)):
        case 0:
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
        case 1:
            data = data[: draw(st.integers(0, len(data)))]
        case 2:
            data = data.replace(b"{", b'{"model": "%s", ' % MODEL.encode(), 1)
        case 3:
            data = text.encode(draw(st.sampled_from(["utf-16", "utf-32"])), "surrogatepass")
        case 4:
            depth = draw(st.sampled_from([10, 1000, 100_000]))
            opening = draw(st.sampled_from([b"[", b'{"a":', b'{"prompt":[']))
            data = b'{"model": "m", "prompt": ' + opening * depth
        case 5:
            data = draw(st.binary(max_size=200))
    return data


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[bytes, bool]:
    """Bytes for a connection, and whether they are a whole request, whose end will come."""
    body = draw(bodies())
    path = draw(
        st.sampled_from((*PATHS, *PATHS, *PATHS, "/v1/models", "/v1/models/%ff", "*", "/é"))
    )
    method = draw(
        st.sampled_from(("POST",) * 8 + ("GET", "PUT", "OPTIONS", "HEAD", "BREW", "CONNECT"))
    )
    kind = draw(
        st.sampled_from(["application/json"] * 4 + ["text/plain", "", "multipart/form-data"])
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n".encode()
    sized = b"Content-Length: %d\r\n\r\n" % len(body)
    close = b"Connection: close\r\n"
    match draw(st.integers(0, 11)):
        case 0:  # in chunks
            chunks = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part)
                for part in _split(body, draw(st.integers(1, 50)))
            )
            return (
                head + close + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
                True,
            )
        case 1:  # chunks without an end, or malformed ones
            size = draw(st.sampled_from([b"5", b"-1", b"zz", b"f" * 20, b"", b"5;" + b"e" * 3000]))
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nabcde\r\n", False
        case 2:  # two lengths, or a length and chunks
            other = draw(
                st.sampled_from([b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"])
            )
            return head + other + sized + body, False
        case 3:  # more, or less, than was announced
            wrong = len(body) + draw(st.integers(-5, 5))
            return head + b"Content-Length: %d\r\n\r\n" % wrong + body, False
        case 4:  # several, one behind the other
            count = draw(st.integers(2, 12))
            return (head + sized + body) * count, False
        case 5:
            return draw(st.binary(max_size=300)), False
        case 6:
            junk = draw(st.binary(max_size=50))
            return head + b"X-Junk: " + junk + b"\r\n" + close + sized + body, False
        case 7:
            return head + b"Expect: 100-continue\r\n" + close + sized + body, True
        case 8:
            return head + b"Upgrade: websocket\r\nConnection: Upgrade\r\n" + sized + body, False
    return head + close + sized + body, method not in ("CONNECT",)


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def one(path: str, body: bytes) -> bytes:
    """A request that is answered and closed."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


search = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@search
@given(st.sampled_from(PATHS), bodies())
@example(PATHS[0], b'{"model": "parrot", "prompt": "a", "seed": 1e400}')
@example(PATHS[1], b'{"model": "parrot", "messages": [{"role": "user", "content": "\\ud800"}]}')
def test_each_body_is_answered(target: Target, path: str, body: bytes) -> None:
    statuses = judge(target.talk(one(path, body)))
    assert len(statuses) == 1
    target.clean()


@search
@given(exchanges())
def test_each_framing_is_answered_or_cut(target: Target, sent: tuple[bytes, bool]) -> None:
    data, whole = sent
    statuses = judge(target.talk(data, whole=whole))
    assert statuses or not whole
    target.clean()


@search
@given(st.sampled_from(["metrics", "admin"]), exchanges())
def test_the_other_ports_are_as_hard(
    target: Target, listener: str, sent: tuple[bytes, bool]
) -> None:
    data, whole = sent
    answer = target.talk(data, whole=whole, listener=listener)
    assert b"HTTP/1.1 5" not in answer, answer[:300]
    target.clean()


@search
@given(st.sampled_from(PATHS), requests, st.integers(0, 3000))
def test_clients_that_leave_leave_nothing(
    target: Target, path: str, request: dict[str, Any], after_bytes: int
) -> None:
    body = json.dumps({**request, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", target.running.ports["http"])) as client:
        client.settimeout(ANSWER_SECONDS)
        client.sendall(one(path, body))
        if after_bytes:
            client.recv(after_bytes)
    target.clean()
