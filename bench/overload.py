"""A replica under ten times the load it can serve, and under clients that mean it harm.

The real server with SmolLM2, in a cgroup whose memory limit is the replica's budget and 10 %, as a
Pod's would be. First its capacity is measured; then requests arrive for a minute at ten times that
rate; then, for a minute, requests of hostile lengths and from hostile clients: one token with
all the output that fits, prompts at the context's end and beyond it, bodies of megabytes made to
be dear to parse, 128 choices, clients that vanish, read or write a few bytes a second, or connect
and say nothing. Told are every request's end, the memory over time, what was left afterwards, and
how long probes of the metrics port took meanwhile.

A request may end as 200, 429 or 503. What can never be served is 413 (too long) or 400 (malformed),
and what does not arrive in time 408; those clients may also be told that the queue is full.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import harness
from bytes import make_tiny
from harness import Figure, progress
from kvscaler_sidecar.weights import builtin
from parts.caged import NoCage, Replica, budget
from parts.clients import Client, End, head

MIB = 1 << 20
POOL_MIB = 128
MAX_CONTEXT_TOKENS = 512
LIMIT_OVER_BUDGET = 1.10
SECONDS = 60.0
CAPACITY_SECONDS = 15.0
CAPACITY_LIMIT_SECONDS = 120.0
CAPACITY_CLIENTS = 24
OVERLOAD = 10
HOSTILE_PER_SECOND = 12.0
SETTLE_SECONDS = 120.0
SAMPLE_SECONDS = 0.5
PROBE_SECONDS = 0.2
WARM_SHARE = 1 / 3
"""Of a phase, in which buffers and heaps take the size that they keep."""
PROMPT_TOKENS = (16, 200)
OUTPUT_TOKENS = (8, 64)

SERVED = frozenset({"200", "429", "503"})
BUSY = frozenset({"429", "503"})
Run = Callable[[Client, random.Random], Awaitable[End]]


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Random words, so that no cache helps."""
    return [rng.randrange(500, 40_000) for _ in range(tokens)]


def ordinary(rng: random.Random) -> dict[str, Any]:
    """A request that a replica is made for."""
    return {
        "model": "m",
        "prompt": prompt(rng, rng.randint(*PROMPT_TOKENS)),
        "max_tokens": rng.randint(*OUTPUT_TOKENS),
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }


@dataclass(frozen=True)
class Kind:
    """A client, how its requests may end, and its share of the arrivals."""

    name: str
    run: Run
    allowed: frozenset[str]
    weight: int = 1


def posts(name: str, allowed: frozenset[str], weight: int = 1, **fields: Any) -> Kind:
    """A kind that sends `fields`; those that are callable make a value."""

    async def run(client: Client, rng: random.Random) -> End:
        made = {k: v(rng) if callable(v) else v for k, v in fields.items()}
        return await client.post({"model": "m", "ignore_eos": True, **made})

    return Kind(name, run, allowed, weight)


def sends(name: str, allowed: frozenset[str], body: bytes, weight: int = 1) -> Kind:
    """A kind that sends these bytes as its body."""

    async def run(client: Client, rng: random.Random) -> End:
        return await client.post(body)

    return Kind(name, run, allowed, weight)


def longest(share: float) -> Callable[[random.Random], list[int]]:
    """A prompt of this share of the context."""
    return lambda rng: prompt(rng, round(MAX_CONTEXT_TOKENS * share))


async def _vanish(client: Client, rng: random.Random) -> End:
    body = {**ordinary(rng), "stream": True, "max_tokens": 300}
    return await client.vanish(body, rng.choice((0, 1, 600)), rng.random() < 0.3)


async def _read_slowly(client: Client, rng: random.Random) -> End:
    body = {**ordinary(rng), "stream": True, "n": 4, "logprobs": 20, "max_tokens": 200}
    return await client.read_slowly(body, rng.choice((16, 2000)), 30.0)


async def _write_body_slowly(client: Client, rng: random.Random) -> End:
    return await client.drip(head(100_000), repeat(b" "), 0.5)


async def _write_head_slowly(client: Client, rng: random.Random) -> End:
    return await client.drip(head(10)[:-2], repeat(b"X-A: b\r\n"), 0.5)


async def _chunks_without_end(client: Client, rng: random.Random) -> End:
    return await client.drip(head(None), repeat(b"1000\r\n" + b" " * 4096 + b"\r\n"), 0.05)


async def _silent(client: Client, rng: random.Random) -> End:
    return await client.raw(b"")


def body_of(value: bytes) -> bytes:
    """A completion whose prompt is written as `value`."""
    return b'{"model": "m", "max_tokens": 4, "prompt": ' + value + b"}"


HUGE = 7 * MIB
TOO_LONG = BUSY | {"413"}
KINDS = (
    Kind("ordinary", lambda client, rng: client.post(ordinary(rng)), SERVED, 8),
    posts("one_token_all_output", SERVED, 4, prompt=[7], max_tokens=MAX_CONTEXT_TOKENS - 1),
    posts("full_context", SERVED, 4, prompt=longest(1 - 1 / MAX_CONTEXT_TOKENS), max_tokens=1),
    posts("half_and_half", SERVED, 3, prompt=longest(0.5), max_tokens=MAX_CONTEXT_TOKENS // 2),
    posts("over_context", TOO_LONG, 3, prompt=longest(1.01), max_tokens=1),
    posts("over_context_text", TOO_LONG, 2, prompt="many words " * 40_000, max_tokens=1),
    posts("128_choices", SERVED, 2, prompt=longest(0.1), n=128, max_tokens=8),
    posts("logprobs", SERVED, 2, prompt=longest(0.1), n=8, logprobs=20, max_tokens=40),
    posts("128_prompts", SERVED, 1, prompt=lambda rng: [prompt(rng, 500)] * 128, max_tokens=2),
    sends("huge_text", TOO_LONG, body_of(b'"' + b"word " * (HUGE // 5) + b'"')),
    sends("huge_wide_text", TOO_LONG, body_of('"🙂{}"'.format("x" * HUGE).encode())),
    sends("huge_escapes", TOO_LONG, body_of(b'"' + rb"\u00e9" * (HUGE // 6) + b'"')),
    sends("huge_ids", TOO_LONG, body_of(b"[" + b"1," * (HUGE // 2) + b"1]")),
    sends("huge_lists", TOO_LONG | {"400"}, body_of(b"[" + b"[]," * (HUGE // 3) + b"[]]")),
    sends("huge_long_words", TOO_LONG, body_of(b'"' + b" " * HUGE + b'"')),
    sends("deep", BUSY | {"400"}, body_of(b"[" * 200_000)),
    sends("above_the_bound", TOO_LONG, body_of(b'"' + b"x" * (9 * MIB) + b'"')),
    sends("malformed", BUSY | {"400"}, b'{"model": "m", "prompt": '),
    Kind("vanishes", _vanish, frozenset({"vanished"}) | SERVED, 4),
    Kind("reads_slowly", _read_slowly, frozenset({"vanished", "cut"}) | SERVED, 3),
    Kind("writes_body_slowly", _write_body_slowly, BUSY | {"408"}, 1),
    Kind("writes_head_slowly", _write_head_slowly, BUSY | {"408"}, 1),
    Kind("chunks_without_end", _chunks_without_end, BUSY | {"408", "413"}, 1),
    Kind("silent", _silent, frozenset({"cut"}), 1),
)


@dataclass
class Watch:
    """Memory and probes while a phase runs."""

    replica: Replica
    resident: list[tuple[float, int]] = field(default_factory=list)
    charged: list[int] = field(default_factory=list)
    probe_seconds: list[float] = field(default_factory=list)
    probe_errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._memory(), self._probes())

    async def _memory(self) -> None:
        while True:
            self.resident.append((time.monotonic(), self.replica.resident_bytes))
            self.charged.append(self.replica.cage.unreclaimable_bytes)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _probes(self) -> None:
        for path in _forever(("/health/live", "/health/ready", "/state", "/metrics")):
            began = time.monotonic()
            try:
                await asyncio.to_thread(self._probe, path)
                self.probe_seconds.append(time.monotonic() - began)
            except OSError as error:
                self.probe_errors.append(f"{path}: {error}")
            await asyncio.sleep(PROBE_SECONDS)

    def _probe(self, path: str) -> None:
        with urllib.request.urlopen(self.replica.url("metrics", path), timeout=10) as answer:
            answer.read()

    def slope_bytes_a_minute(self) -> float:
        """Of the resident set, least squares, without the phase's beginning."""
        first, last = self.resident[0][0], self.resident[-1][0]
        kept = [(t, b) for t, b in self.resident if t >= first + WARM_SHARE * (last - first)]
        slope = statistics.linear_regression(
            [t for t, _ in kept], [float(b) for _, b in kept]
        ).slope
        return slope * 60


def _forever(paths: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from paths


@dataclass
class Phase:
    """What a phase saw."""

    name: str
    watch: Watch
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def note(self, kind: Kind, end: End) -> None:
        """Count how a request ended."""
        self.ends.setdefault(kind.name, Counter())[end.how] += 1
        if end.how not in kind.allowed or (end.how == "200" and not end.complete):
            if kind.name == "reads_slowly" and end.how == "200":
                return  # it left some unread, which is its own doing
            self.unexpected.append(f"{kind.name}: {end.how} {end.words[-200:]}")

    def counted(self, name: str) -> int:
        """Growth of one of the replica's own counters over the phase."""
        return int(self.after["traffic"][name]) - int(self.before["traffic"][name])

    def detail(self) -> dict[str, Any]:
        """For the report."""
        total: Counter[str] = sum(self.ends.values(), Counter())
        return {
            "requests": sum(total.values()),
            "ends": dict(total),
            "ends_by_kind": {name: dict(ends) for name, ends in self.ends.items()},
            "unexpected": self.unexpected[:10],
            "finished": self.counted("finished"),
            "cancelled": self.counted("cancelled"),
            "preemptions": self.counted("preemptions"),
            "probes": len(self.watch.probe_seconds),
            "probe_errors": self.watch.probe_errors[:5],
            "probe_median_seconds": statistics.median(self.watch.probe_seconds),
        }


async def measure_capacity(client: Client) -> float:
    """Ordinary requests a second that the replica finishes when there are always enough."""
    finished: list[float] = []
    began = time.monotonic()

    def enough() -> bool:
        waited = time.monotonic() - began
        return waited > CAPACITY_SECONDS and (
            len(finished) >= 2 * CAPACITY_CLIENTS or waited > CAPACITY_LIMIT_SECONDS
        )

    async def one(seed: int) -> None:
        rng = random.Random(seed)
        while not enough():
            end = await client.post(ordinary(rng))
            if end.how == "200":
                finished.append(time.monotonic())

    await asyncio.gather(*(one(seed) for seed in range(CAPACITY_CLIENTS)))
    if not finished:
        raise RuntimeError(f"no request was served in {CAPACITY_LIMIT_SECONDS:.0f} s")
    return len(finished) / (max(finished) - began)


async def load(
    phase: Phase, client: Client, kinds: tuple[Kind, ...], rate: float, seconds: float
) -> None:
    """Open-loop Poisson arrivals of `kinds`, until each request has ended."""
    rng = random.Random(len(phase.name))
    phase.before = await asyncio.to_thread(phase.watch.replica.state)
    watching = asyncio.create_task(phase.watch.run())
    tasks: set[asyncio.Task[None]] = set()

    async def one(kind: Kind, seed: int) -> None:
        try:
            end = await kind.run(client, random.Random(seed))
        except OSError as error:
            end = End("cut", words=str(error))
        phase.note(kind, end)

    weights = [kind.weight for kind in kinds]
    began, at = time.monotonic(), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        (kind,) = rng.choices(kinds, weights)
        tasks.add(asyncio.create_task(one(kind, rng.randrange(1 << 30))))
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    await asyncio.gather(*tasks)
    phase.after = await asyncio.to_thread(settled, phase.watch.replica)


def settled(replica: Replica) -> dict[str, Any]:
    """The replica's state once nothing runs or waits, or what it is after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        state = replica.state()
        use = state["occupancy"]
        busy = use["running_requests"] or use["waiting_requests"] or use["referenced_blocks"]
        if not busy or time.monotonic() > deadline:
            return state
        time.sleep(0.2)


def figures(phase: Phase, planned_bytes: int) -> list[Figure]:
    """A phase against its floors."""
    watch, use = phase.watch, phase.after["occupancy"]
    held = use["capacity_blocks"] - use["free_blocks"] - use["cached_blocks"]
    probes = watch.probe_seconds
    return [
        Figure(f"{phase.name}_unexpected_ends", len(phase.unexpected), "requests", "== 0"),
        Figure(
            f"{phase.name}_peak_over_budget",
            max(b for _, b in watch.resident) / planned_bytes,
            floor=f"<= {LIMIT_OVER_BUDGET}",
            aim="<= 1.0",
            peer={
                "resident_bytes": max(b for _, b in watch.resident),
                "charged_bytes": max(watch.charged),
                "budget_bytes": planned_bytes,
            },
        ),
        Figure(
            f"{phase.name}_memory_slope",
            watch.slope_bytes_a_minute() / planned_bytes,
            "of the budget a minute",
            "<= 0.01",
        ),
        Figure(f"{phase.name}_blocks_held_after", held, "blocks", "== 0"),
        Figure(
            f"{phase.name}_preemptions_per_finished",
            phase.counted("preemptions") / max(1, phase.counted("finished")),
            floor="<= 0.2",
        ),
        Figure(f"{phase.name}_probe_errors", len(watch.probe_errors), "probes", "== 0"),
        Figure(
            f"{phase.name}_probe_slowest",
            max(probes),
            "s",
            "<= 0.5",
            "<= 0.1",
            peer={"median": statistics.median(probes)},
        ),
    ]


async def measure(replica: Replica, options: argparse.Namespace) -> tuple[list[Phase], float]:
    """Both phases, and the capacity in requests a second."""
    client = Client(replica.ports["http"])
    capacity = await measure_capacity(client)
    progress(f"capacity: {capacity:.2f} requests/s")
    ten_times = Phase("overload", Watch(replica))
    hostile = Phase("hostile", Watch(replica))
    await load(ten_times, client, KINDS[:1], OVERLOAD * capacity, options.seconds)
    progress(f"overload: {ten_times.detail()}")
    await load(hostile, client, KINDS, HOSTILE_PER_SECOND, options.seconds)
    progress(f"hostile: {hostile.detail()}")
    return [ten_times, hostile], capacity


def main() -> int:
    """Measure and report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of each phase")
    parser.add_argument(
        "--model",
        choices=("smollm2", "tiny"),
        default="smollm2",
        help="tiny: random weights; more requests a second on a slow machine",
    )
    parser.add_argument("--pool-mib", type=int, default=POOL_MIB)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the replica ends too
    from kvscaler_sidecar.executors.dtype import choose_compute_dtype

    dtype = choose_compute_dtype().name
    with tempfile.TemporaryDirectory() as scratch:
        if options.model == "tiny":
            folder = make_tiny(Path(scratch))
        else:
            folder = builtin.ensure("builtin://smollm2-135m")
        return measure_model(folder, dtype, options)


def measure_model(folder: Path, dtype: str, options: argparse.Namespace) -> int:
    """Measure and report one model; the exit status."""
    plan = budget(folder, options.pool_mib, MAX_CONTEXT_TOKENS, dtype)
    planned = plan["totalBytes"]
    limit = round(planned * LIMIT_OVER_BUDGET)
    progress(
        f"budget {planned / MIB:.0f} MiB, {plan['blocks']} blocks; limit {limit / MIB:.0f} MiB"
    )
    phases: list[Phase] = []
    capacity: float | None = None
    try:
        with Replica(folder, plan["deviceBytes"], limit, MAX_CONTEXT_TOKENS) as replica:
            try:
                phases, capacity = asyncio.run(measure(replica, options))
                restarted = phases[0].before["started_at"] != replica.state()["started_at"]
                alive = not restarted and replica.process.poll() is None
            except OSError:
                alive = replica.process.poll() is None
                if alive:
                    raise
            kills = replica.cage.oom_kills
    except NoCage as error:
        return harness.report(
            "overload",
            [Figure("oom_kills", None, "processes", "== 0", why=str(error))],
            check=options.check,
        )
    found = [
        Figure("oom_kills", kills, "processes", "== 0"),
        Figure("alive", float(alive), floor="== 1"),
    ]
    for phase in phases:
        found += figures(phase, planned)
    detail = {
        "model": options.model,
        "compute_dtype": dtype,
        "capacity_requests_per_second": capacity,
        "overload_factor": OVERLOAD,
        "memory_limit_bytes": limit,
        "phases": {phase.name: phase.detail() for phase in phases},
    }
    return harness.report(
        "overload", found, detail, check=options.check, packages=("torch", "uvicorn")
    )


if __name__ == "__main__":
    sys.exit(main())
