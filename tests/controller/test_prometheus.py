"""Prometheus as a source: the same facts as the direct path, and every fault with its name."""

import asyncio
import contextlib
import json
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler.protocol.drain import DrainPhase, DrainReport
from kvscaler.protocol.limits import LimitsReport
from kvscaler.protocol.metrics import STATE_METRICS
from kvscaler.protocol.state import Histogram, InFlight, ReplicaState, TrafficCounters
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_operator.gateways.breaker import Breaker, BreakerState
from kvscaler_operator.gateways.prometheus import (
    DOWN,
    SCRAPE_TIME,
    PrometheusError,
    PrometheusGateway,
    PrometheusServer,
    Series,
    queries,
)
from kvscaler_operator.scraped import NOT_SCRAPED, TWO_PROCESSES, by_pod, replica_state
from kvscaler_sidecar.metrics import StateCollector
from localcluster.debian import prometheus_2
from localcluster.steps import ClusterError
from prometheus_client import CollectorRegistry, generate_latest

from tests.controller.fake_prometheus import (
    Answer,
    FakePrometheus,
    empty,
    hang,
    overloaded,
    vector,
)
from tests.controller.sidecars import OWN_LIMITS, make_state
from tests.controller.world import free_port

COUNTS = tuple(range(25))
BUSY = make_state(
    "service-1",
    "pod-1",
    "chat-1",
    limits=LimitsReport(
        hash=OWN_LIMITS.content_hash,
        applied=OWN_LIMITS,
        own_hash=OWN_LIMITS.content_hash,
        requested_hash="0123456789abcdef",
    ),
    drain=DrainReport(phase=DrainPhase.LINGERING, live_requests=2),
    in_flight=InFlight(
        requests=3, prompt_tokens=70, generated_tokens=11, generated_tokens_squared=51.0
    ),
    traffic=TrafficCounters(
        arrivals=40,
        arrival_prompt_tokens=4000.0,
        admitted=33,
        refused={"QueueFull": 5, "ContextTooLong": 2},
        finished=30,
        finished_block_seconds=12.5,
        time_to_first_token=Histogram(counts=COUNTS, sum_seconds=77.5),
        queue_wait=Histogram(counts=COUNTS[::-1], sum_seconds=1.25),
    ),
)
NOT_EXPORTED = {"budget", "version", "model", "executor", "observed_at"}
"""Facts in words, which only the direct path carries in full, and the clock's fraction."""


def page(state: ReplicaState) -> bytes:
    """The sidecar's own metrics page."""
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: state, lambda: None))
    return generate_latest(registry)


def state_of(series: list[Series], pod: str = "chat-1") -> Signal[ReplicaState]:
    found = by_pod(series).get(("ns", pod), [])
    return replica_state(
        found, service_uid="service-1", service_name="chat", pod_uid="pod-1", pod_name=pod
    )


def gateway_for(url: str, **options: object) -> PrometheusGateway:
    return PrometheusGateway(PrometheusServer("default", url), **options)  # type: ignore[arg-type]


async def until(check: Callable[[], Awaitable[bool]], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


class Pages:
    """Metrics pages of two Pods, scraped by a real Prometheus each second."""

    def __init__(self) -> None:
        self.states = {"chat-1": BUSY, "chat-2": BUSY.model_copy(update={"pod_name": "chat-2"})}
        self.port = free_port()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/{pod}", self._page)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        pod = request.match_info["pod"]
        if pod == "mallory":
            return web.Response(body=claiming("ns", "chat-2", page(MALLORY)))
        return web.Response(body=page(self.states[pod]))


def claiming(namespace: str, pod: str, text: bytes) -> bytes:
    """A page whose own labels say that it is about another Pod."""
    labels = f'namespace="{namespace}",pod="{pod}"'
    lines = []
    for line in text.decode().splitlines():
        name, value = line.rsplit(" ", 1)
        if line.startswith("#"):
            lines.append(line)
        elif name.endswith("}"):
            lines.append(f"{name[:-1]},{labels}}} {value}")
        else:
            lines.append(f"{name}{{{labels}}} {value}")
    return ("\n".join(lines) + "\n").encode()


MALLORY = BUSY.model_copy(
    update={
        "started_at": BUSY.started_at - 3_600.0,
        "traffic": BUSY.traffic.model_copy(update={"arrivals": 1_000_000}),
    }
)
Start = Callable[..., str]
"""`start(port of the pages, more scrape jobs as YAML)` gives the URL."""


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Start]:
    """Start a real Prometheus that scrapes the pages at a port; gives its URL."""
    try:
        binary = prometheus_2()
    except ClusterError as error:
        pytest.skip(f"no Prometheus to test with: {error}")
    processes = []

    def start(pages_port: int, more: str = "") -> str:
        jobs = "".join(
            f"- job_name: {job}\n"
            f"  metrics_path: /{pod}\n"
            "  static_configs:\n"
            f"  - targets: ['127.0.0.1:{pages_port}']\n"
            f"    labels: {{namespace: ns, pod: {pod}}}\n"
            # The first Pod is scraped by two jobs, as happens when discovery overlaps.
            for job, pod in (("a", "chat-1"), ("again", "chat-1"), ("b", "chat-2"))
        )
        config = tmp_path / "prometheus.yml"
        config.write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs:\n{jobs}{more}")
        port = free_port()
        processes.append(
            subprocess.Popen(
                [
                    binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=error",
                ]
            )
        )
        return f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)


async def test_a_real_prometheus_gives_the_facts_of_the_direct_path(
    prometheus: Start,
) -> None:
    pages = Pages()
    await pages.start()
    gateway = gateway_for(prometheus(pages.port), breaker=Breaker(threshold=1000))
    seen: list[Signal[ReplicaState]] = []

    async def scraped() -> bool:
        try:
            series = await gateway.read_all()
        except PrometheusError:
            return False
        seen[:] = [state_of(series), state_of(series, "chat-2"), state_of(series, "stranger")]
        return isinstance(seen[0], Present) and isinstance(seen[1], Present)

    await until(scraped)
    first, second, stranger = seen
    assert isinstance(first, Present)
    assert abs(first.time - time.time()) < 10
    exported = first.value.model_dump(exclude=NOT_EXPORTED)
    assert exported == BUSY.model_copy(
        update={"drain": BUSY.drain.model_copy(update={"since": None})}
    ).model_dump(exclude=NOT_EXPORTED)
    assert first.value.executor.compute_dtype == "float32"
    assert isinstance(second, Present)
    assert stranger == Absent(AbsenceReason.MISSING, "prometheus", NOT_SCRAPED)

    await pages.stop()

    async def gone() -> bool:
        seen[:] = [state_of(await gateway.read_all())]
        return isinstance(seen[0], Absent)

    await until(gone)
    assert isinstance(seen[0], Absent)
    assert seen[0].reason is AbsenceReason.MISSING
    assert "scrape fails" in seen[0].detail
    gateway.close()


async def test_a_restart_between_two_scrapes_is_never_a_mixture(prometheus: Start) -> None:
    """The first Pod is scraped by two jobs: for a while one has the process before the restart."""
    pages = Pages()
    await pages.start()
    gateway = gateway_for(prometheus(pages.port), breaker=Breaker(threshold=1000))
    seen: list[Signal[ReplicaState]] = []
    started = BUSY.started_at + 500.0
    reborn = BUSY.model_copy(update={"started_at": started, "traffic": TrafficCounters(arrivals=1)})

    async def scraped() -> bool:
        with contextlib.suppress(PrometheusError):
            seen[:] = [state_of(await gateway.read_all())]
        return bool(seen) and isinstance(seen[0], Present)

    async def restarted() -> bool:
        (found,) = seen[:] = [state_of(await gateway.read_all())]
        if isinstance(found, Absent):
            return False
        arrivals = found.value.traffic.arrivals
        assert (found.value.started_at, arrivals) in ((BUSY.started_at, 40), (started, 1))
        return arrivals == 1

    await until(scraped)
    pages.states["chat-1"] = reborn
    await until(restarted)
    await pages.stop()
    gateway.close()


@pytest.mark.parametrize("honored", [False, True])
async def test_labels_that_a_stranger_exports_steer_nothing(
    prometheus: Start, honored: bool
) -> None:
    pages = Pages()
    await pages.start()
    job = (
        "- job_name: mallory\n"
        "  metrics_path: /mallory\n"
        f"  honor_labels: {str(honored).lower()}\n"
        "  static_configs:\n"
        f"  - targets: ['127.0.0.1:{pages.port}']\n"
        "    labels: {namespace: stranger, pod: mallory}\n"
    )
    gateway = gateway_for(prometheus(pages.port, job), breaker=Breaker(threshold=1000))
    seen: list[Signal[ReplicaState]] = []

    async def scraped() -> bool:
        with contextlib.suppress(PrometheusError):
            series = await gateway.read_all()
            stranger = by_pod(series).get(("stranger", "mallory"))
            seen[:] = [state_of(series, pod) for pod in ("chat-1", "chat-2")]
            wanted = Absent if honored else Present
            return (
                isinstance(seen[0], Present)
                and isinstance(seen[1], wanted)
                and (honored or bool(stranger))
                and "no kvscaler_ready" not in str(seen[1])
                and "scraped while it was read" not in str(seen[1])
            )
        return False

    await until(scraped)
    if honored:
        assert isinstance(seen[1], Absent)
        assert (seen[1].reason, seen[1].detail) == (AbsenceReason.MISMATCHED, TWO_PROCESSES)
    else:
        assert isinstance(seen[1], Present)
        assert seen[1].value.traffic.arrivals == 40
    await pages.stop()
    gateway.close()


async def test_a_metric_that_relabelling_renames_is_not_read_as_zero(prometheus: Start) -> None:
    pages = Pages()
    pages.states["chat-3"] = BUSY.model_copy(update={"pod_name": "chat-3"})
    await pages.start()
    job = (
        "- job_name: renamed\n"
        "  metrics_path: /chat-3\n"
        "  static_configs:\n"
        f"  - targets: ['127.0.0.1:{pages.port}']\n"
        "    labels: {namespace: ns, pod: chat-3}\n"
        "  metric_relabel_configs:\n"
        "  - {source_labels: [__name__], regex: kvscaler_requests_arrived_total,"
        " target_label: __name__, replacement: arrivals}\n"
    )
    gateway = gateway_for(prometheus(pages.port, job), breaker=Breaker(threshold=1000))
    seen: list[Signal[ReplicaState]] = []

    async def scraped() -> bool:
        with contextlib.suppress(PrometheusError):
            seen[:] = [state_of(await gateway.read_all(), "chat-3")]
        return bool(seen) and isinstance(seen[0], Absent) and seen[0].last_seen is not None

    await until(scraped)
    assert isinstance(seen[0], Absent)
    assert seen[0].reason is AbsenceReason.PARTIAL
    assert seen[0].detail == "no series of kvscaler_requests_arrived_total"
    await pages.stop()
    gateway.close()


def test_the_queries_are_few_and_fixed() -> None:
    made = queries(["blue", "green"])
    assert len(made) <= 20
    assert all('namespace=~"blue|green"' in text for text in made.values())
    assert all("namespace, pod" in text for text in made.values())
    assert max(len(text) for text in made.values()) < 2000


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(600):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


async def moved(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/")


async def nested(_: web.Request) -> web.Response:
    return web.Response(text="[" * 200_000)


async def garbage(_: web.Request) -> web.Response:
    return web.Response(body=b"\x00\xff not JSON")


async def scalar(_: web.Request) -> web.Response:
    result = {"resultType": "scalar", "result": [1.0, "NaN"]}
    return web.Response(text=json.dumps({"status": "success", "data": result}))


async def words(_: web.Request) -> web.Response:
    return web.Response(text=vector({"metric": {}, "value": "3"}))


async def test_an_empty_answer_is_no_error_and_no_value() -> None:
    async with FakePrometheus(empty) as fake:
        gateway = gateway_for(fake.url)
        assert await gateway.read_all() == []
        assert fake.asked == len(queries()) + 1  # the scrape times twice
        gateway.close()


@pytest.mark.parametrize(
    "answer",
    [hang, drip, overloaded, moved, garbage, nested, scalar, words],
    ids=lambda f: f.__name__,
)
async def test_every_fault_is_an_error_within_its_time(answer: Answer) -> None:
    async with FakePrometheus(answer) as fake:
        gateway = gateway_for(fake.url, query_seconds=0.3)
        begun = time.monotonic()
        with pytest.raises(PrometheusError, match="Prometheus default"):
            await gateway.read_all()
        assert time.monotonic() - begun < 10
        gateway.close()


async def test_a_server_that_answers_every_other_time_is_read() -> None:
    seen: Counter[str] = Counter()

    async def by_turns(request: web.Request) -> web.StreamResponse:
        seen[request.query["query"]] += 1
        return await (overloaded if seen[request.query["query"]] % 2 else empty)(request)

    async with FakePrometheus(by_turns) as fake:
        gateway = gateway_for(fake.url)
        assert await gateway.read_all() == []
        gateway.close()


@pytest.mark.parametrize("ahead", [-86_400.0, 86_400.0])
async def test_scrape_times_are_told_by_our_clock(ahead: float) -> None:
    async with FakePrometheus() as fake:
        fake.targets = lambda: [("ns", "chat-1", BUSY)]
        fake.clock_seconds = ahead
        fake.scrape()
        fake.scraping = False
        gateway = gateway_for(fake.url)
        first, again = state_of(await gateway.read_all()), state_of(await gateway.read_all())
        assert isinstance(first, Present) and isinstance(again, Present)
        assert abs(first.time - time.time()) < 10
        assert again.time == first.time
        gateway.close()


async def test_a_probe_that_is_given_up_is_a_failed_one() -> None:
    async with FakePrometheus(hang) as fake:
        breaker = Breaker(threshold=1, pause_seconds=0.01)
        gateway = gateway_for(fake.url, query_seconds=3.0, breaker=breaker)
        breaker.failed()

        async def probing() -> bool:
            reading = asyncio.create_task(gateway.read_all())
            await asyncio.wait([reading], timeout=0.3)
            if reading.done():
                return reading.exception() is None
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return True

        await until(probing)
        assert breaker.state is BreakerState.OPEN
        gateway.close()


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscaler_operator.gateways.prometheus.MAX_ANSWER_BYTES", 1 << 20)

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 10_000_000)

    async with FakePrometheus(large) as fake:
        gateway = gateway_for(fake.url)
        with pytest.raises(PrometheusError, match="answer larger than 1 MiB"):
            await gateway.read_all()
        gateway.close()


async def test_the_breaker_spares_a_dead_server_and_finds_it_alive_again() -> None:
    async with FakePrometheus(overloaded) as fake:
        breaker = Breaker(threshold=2, pause_seconds=0.5)
        gateway = gateway_for(fake.url, breaker=breaker)
        for _ in range(2):
            with pytest.raises(PrometheusError):
                await gateway.read_all()
        assert breaker.state is BreakerState.OPEN
        asked = fake.asked
        with pytest.raises(PrometheusError, match="breaker is open"):
            await gateway.read_all()
        assert fake.asked == asked
        fake.answer = empty

        async def healthy() -> bool:
            try:
                return await gateway.read_all() == []
            except PrometheusError:
                return False

        await until(healthy)
        assert breaker.state is BreakerState.CLOSED
        gateway.close()


def series(query: str, value: str, **labels: str) -> Series:
    return Series(query, {"namespace": "ns", "pod": "chat-1", **labels}, value)


def absence(*found: Series) -> Absent:
    signal = state_of(list(found))
    assert isinstance(signal, Absent)
    return signal


def test_absences_have_their_reasons() -> None:
    assert absence().reason is AbsenceReason.MISSING
    scraped = series(SCRAPE_TIME, "1000")
    partial = absence(scraped)
    assert (partial.reason, partial.last_seen) == (AbsenceReason.PARTIAL, 1000)
    nan = absence(scraped, series("numbers-0", "NaN", __name__="kvscaler_requests_running"))
    assert nan.reason is AbsenceReason.NOT_A_NUMBER
    assert "kvscaler_requests_running is NaN" in nan.detail
    infinite = absence(scraped, series("numbers-0", "+Inf", __name__="kvscaler_ready"))
    assert infinite.reason is AbsenceReason.NOT_A_NUMBER
    down = absence(series(DOWN, "0"))
    assert (down.reason, down.detail) == (AbsenceReason.MISSING, "its scrape fails (up is 0)")
    # A job that scrapes another port of the Pod in vain says nothing about ours.
    assert absence(scraped, series(DOWN, "0")).reason is AbsenceReason.PARTIAL


def test_what_was_scraped_while_it_was_read_is_of_no_one_time() -> None:
    """Counters of one scrape under the time of the next would double the rate after it."""
    found = absence(series(SCRAPE_TIME, "1000"), series(SCRAPE_TIME, "1005"))
    assert found.reason is AbsenceReason.MISSING
    assert "scraped while" in str(found)
    same = absence(series(SCRAPE_TIME, "1000"), series(SCRAPE_TIME, "1000"))
    assert "scraped while" not in str(same)


def test_a_histogram_that_lacks_a_bucket_is_partial() -> None:
    found = [
        series(SCRAPE_TIME, "1000"),
        series("buckets", "3", __name__="kvscaler_queue_wait_seconds_bucket", le="+Inf"),
    ]
    assert absence(*found).reason is AbsenceReason.PARTIAL


def test_series_without_target_labels_belong_to_nobody() -> None:
    assert by_pod([Series("blocks", {"pod": "chat-1"}, "1"), Series("blocks", {}, "1")]) == {}


HOSTILE = ("", ".", "a", "a.b", "a_blocks.c", "capacity.kv_blocks", "NaN", "counts")


hostile_series = st.builds(
    lambda query, value, labels: series(query, value, **labels),
    st.sampled_from(sorted(queries())),
    st.sampled_from(["0", "1", "3", "0.5", "-1", "NaN", "+Inf", "1e308", "x"]),
    st.dictionaries(
        st.sampled_from(["__name__", "le", "state", "reason", "phase", "hash", "mode"]),
        st.sampled_from([*HOSTILE, *(metric.name for metric in STATE_METRICS[:8])]),
    ),
)


@settings(max_examples=200)
@given(st.lists(hostile_series, max_size=8))
def test_no_label_or_value_that_a_pod_exports_breaks_the_reader(found: list[Series]) -> None:
    """One Pod's page is read with all others': an error would end the operator for all services."""
    signal = state_of([series(SCRAPE_TIME, "1000"), *found])
    assert isinstance(signal, Present | Absent)


def test_reasons_with_dots_are_keys_and_not_paths() -> None:
    found = [
        series(SCRAPE_TIME, "1000"),
        series("refused", "1", reason="a"),
        series("refused", "2", reason="a.b"),
        series("blocks", "1", state="x"),
        series("blocks", "2", state="x_blocks.y"),
        series("buckets", "2", __name__="kvscaler_queue_wait_seconds_bucket"),
    ]
    assert absence(*found).reason is AbsenceReason.PARTIAL
