"""Prometheus, through `prometheus-api-client`, which blocks, waits without end and retries.

So: a small private thread pool, a deadline in the thread and another outside it, no redirects, a
bounded answer, and a breaker that also opens when all threads are stuck (a thread in a socket call
can't be cancelled). Only an answer of 502, 503 or 504 is asked again at once: behind a balancer the
next server may be well, and a pass needs every answer.
One pass makes a fixed set of queries for *all* services.
Queries group by the target labels `namespace` and `pod` alone, and take the maximum, so that a
Pod scraped twice is not counted twice, and a label that a Pod exports steers nothing.
Scrape times are handed on by our own clock (see `server_clock`).
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests
from kvscaler.protocol import metrics as names
from kvscaler.protocol.metrics import STATE_METRICS, MetricKind
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from kvscaler_operator.gateways.breaker import Breaker
from kvscaler_operator.gateways.server_clock import ServerClock, date_of

logger = logging.getLogger(__name__)

THREADS = 4
CONNECT_SECONDS = 2.0
QUERY_SECONDS = 4.0
MAX_ANSWER_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16
NAMES_PER_QUERY = 25
ASK_AGAIN_STATUSES = frozenset({502, 503, 504})
TRIES = 6
PAUSE_SECONDS = 0.05
SCRAPE_TIME = "scrape_time"
FIRST_START = "first_start"
"""The earliest start among a Pod's processes; the numbers have the latest."""
DOWN = "down"
BUCKETS = "buckets"
Labels = Mapping[str, str]
Clocks = tuple[float, float, float]
"""A server's clock, and ours before and after, in Unix seconds."""


class PrometheusError(Exception):
    """A pass over Prometheus failed: nothing of it may be used."""


class PrometheusNotAsked(PrometheusError):
    """No pass was made: the server failed too often, and its pause is not over."""


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """One configured server. Files are read for every pass, since their contents rotate."""

    name: str
    url: str
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    headers: Mapping[str, str] | None = None
    """More headers, such as the tenant of a multi-tenant front."""


@dataclass(frozen=True, slots=True)
class Series:
    """One sample of a query's answer; `value` is still text, `NaN` and `+Inf` included."""

    query: str
    labels: Labels
    value: str


@dataclass(frozen=True, slots=True)
class PodLabels(Mapping[str, str]):
    """Labels of a series. All but the Pod's are the same for every Pod, and kept once: a pass over
    a thousand Pods has a hundred thousand series."""

    namespace: str
    pod: str
    others: Labels

    def __getitem__(self, name: str) -> str:
        if name == "namespace" and self.namespace:
            return self.namespace
        if name == "pod" and self.pod:
            return self.pod
        return self.others[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in ("namespace", "pod") if getattr(self, name))
        yield from self.others

    def __len__(self) -> int:
        return sum(1 for _ in self)


def queries(namespaces: Sequence[str] = ()) -> dict[str, str]:
    """The fixed set of queries by name, for all services at once."""
    scope = ""
    if namespaces:
        pattern = "|".join(re.escape(namespace) for namespace in sorted(namespaces))
        scope = f'namespace=~"{_quoted(pattern)}"'
    braces = f"{{{scope}}}" if scope else ""
    plain = [m.name for m in STATE_METRICS if _is_plain(m)]
    result: dict[str, str] = {}
    for index in range(0, len(plain), NAMES_PER_QUERY):
        part = _any_of(plain[index : index + NAMES_PER_QUERY], scope)
        result[f"numbers-{index // NAMES_PER_QUERY}"] = (
            f"max by (__name__, namespace, pod) ({part})"
        )
    histograms = sorted({m.name for m in STATE_METRICS if m.kind is MetricKind.HISTOGRAM})
    sums = _any_of([f"{name}_sum" for name in histograms], scope)
    for index, name in enumerate(histograms):
        # Two thirds of all series: one answer with all of them would be parsed in one long go.
        buckets = _any_of([f"{name}_bucket"], scope)
        result[f"{BUCKETS}-{index}"] = f"max by (__name__, namespace, pod, le) ({buckets})"
    result["sums"] = f"max by (__name__, namespace, pod) ({sums})"

    def grouped(metric: str, *labels: str) -> str:
        return f"max by ({', '.join(('namespace', 'pod', *labels))}) ({metric}{braces})"

    result["blocks"] = grouped(names.KV_BLOCKS, "state")
    result["refused"] = grouped(names.REQUESTS_REFUSED, "reason")
    result["limits"] = grouped(
        names.LIMITS_INFO, "hash", "own_hash", "requested_hash", "charge", "mode"
    )
    executor = ("type", "device", "compute_dtype", "kv_dtype", "time_scale")
    result["executor"] = grouped(names.EXECUTOR_INFO, *executor)
    result["model"] = grouped(names.MODEL_INFO, "uri", "digest", "served_names")
    result["drain"] = f"{grouped(names.DRAIN_PHASE, 'phase')} == 1"
    stamp = f"timestamp({names.READY}{braces})"
    result[SCRAPE_TIME] = f"max by (namespace, pod) ({stamp})"
    result[FIRST_START] = f"min by (namespace, pod) ({names.START_TIME}{braces})"
    pods = 'pod!=""' + (f", {scope}" if scope else "")
    result[DOWN] = f"max by (namespace, pod) (up{{{pods}}}) == 0"
    return result


def _is_plain(metric: names.StateMetric) -> bool:
    return (
        metric.kind is not MetricKind.HISTOGRAM and metric.key_label is None and not metric.labels
    )


def _any_of(wanted: Sequence[str], scope: str) -> str:
    pattern = "|".join(re.escape(name) for name in wanted)
    return f'{{__name__=~"{_quoted(pattern)}"{", " + scope if scope else ""}}}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


class PrometheusGateway:
    """Passes over one server."""

    def __init__(
        self,
        server: PrometheusServer,
        namespaces: Sequence[str] = (),
        *,
        query_seconds: float = QUERY_SECONDS,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._queries = queries(namespaces)
        self._seconds = query_seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"prometheus-{server.name}")
        self._outstanding: set[Future[Any]] = set()
        self._clock = clock
        self.server_clock = ServerClock()
        self.breaker = breaker or Breaker()

    def close(self) -> None:
        """Take no more queries; threads that are stuck end with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def read_all(self, *, whole: bool = True) -> list[Series]:
        """All series of one pass; raises `PrometheusError` when any query fails.

        Without `whole` only the scrape times are asked for, to know that the server answers; no
        series are given then, as none is anything without the others.
        """
        if not self.breaker.allows():
            raise PrometheusNotAsked(
                f"{self._what}: not asked, as it failed before (breaker is open)"
            )
        try:
            self._outstanding = {f for f in self._outstanding if not f.done()}
            if len(self._outstanding) >= THREADS:
                raise PrometheusError(
                    f"{self._what}: all {THREADS} threads hang in earlier queries"
                )
            # Before and after the rest: a Pod that was scraped meanwhile has two scrape times, and
            # counters of either. Under the wrong time they would show twice the rate, or half.
            stamp = self._queries[SCRAPE_TIME]
            first = await self._ask(SCRAPE_TIME, stamp)
            if not whole:
                self.breaker.succeeded()
                return []
            rest = await asyncio.gather(
                *(self._ask(n, query) for n, query in self._queries.items() if n != SCRAPE_TIME)
            )
            looks = _lasting(first, await self._ask(SCRAPE_TIME, stamp))
        except BaseException:
            # Whatever ended it, a probe that is never accounted for would shut the breaker for good.
            self.breaker.failed()
            raise
        self.breaker.succeeded()
        offset = self.server_clock.news()
        if offset is not None:
            logger.warning(
                "%s: its clock is %.0f s ahead of ours; allowed for", self._what, -offset
            )
        stamps = [self._on_our_clock(series) for look in looks for series in look]
        return [series for answer in (*rest, stamps) for series in answer]

    def _on_our_clock(self, series: Series) -> Series:
        offset = self.server_clock.offset_seconds
        if not offset:
            return series
        try:
            return replace(series, value=str(float(series.value) + offset))
        except ValueError:
            return series

    @property
    def _what(self) -> str:
        return f"Prometheus {self._server.name} at {self._server.url}"

    async def _ask(self, name: str, query: str) -> list[Series]:
        rounds = -(-len(self._queries) // THREADS)
        future = self._pool.submit(self._series, name, query)
        self._outstanding.add(future)
        try:
            async with asyncio.timeout(rounds * self._seconds + 1.0):
                answer, seen = await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError as error:
            future.cancel()
            raise PrometheusError(f"{self._what}: query {name} got no answer in time") from error
        except (requests.RequestException, PrometheusApiClientException) as error:
            raise PrometheusError(f"{self._what}: {_cause(error)}") from error
        except PrometheusError:
            raise
        except Exception as error:
            # What JSON of any shape makes the client do, to the end of the interpreter's stack.
            cause = repr(error)[:300]
            raise PrometheusError(f"{self._what}: no such answer as expected: {cause}") from error
        if seen is not None:
            self.server_clock.compare(*seen)
        return answer

    def _series(self, name: str, query: str) -> tuple[list[Series], Clocks | None]:
        """Ask, and take the answer apart, in a thread: with a thousand Pods it has many series."""
        answer, seen = self._query(query)
        return _series(name, answer, self._what), seen

    def _query(self, query: str) -> tuple[Any, Clocks | None]:
        """The client's answer, and the server's clock with ours before and after."""
        headers = dict(self._server.headers or {})
        if self._server.bearer_token_file is not None:
            try:
                token = self._server.bearer_token_file.read_text().strip()
            except OSError as error:
                raise requests.RequestException(f"cannot read the bearer token: {error}") from error
            headers["Authorization"] = f"Bearer {token}"
        with _BoundedSession(self._seconds) as session:
            session.trust_env = False
            if self._server.ca_file is not None:
                session.verify = str(self._server.ca_file)
            if self._server.certificate_file and self._server.key_file:
                session.cert = (str(self._server.certificate_file), str(self._server.key_file))
            client = PrometheusConnect(
                url=self._server.url.rstrip("/"),
                headers=headers,
                session=session,
                retry=Retry(total=0, redirect=False),
                timeout=(CONNECT_SECONDS, self._seconds),
            )
            before = self._clock()
            answer = client.custom_query(query)
            date = session.date
            return answer, None if date is None else (date, before, self._clock())


class _BoundedSession(requests.Session):
    """A session whose answers have a size and a deadline that dripping bytes can't extend."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.date: float | None = None
        """Unix seconds of the last answer's `Date`."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """As `requests` does, but read here, within the bounds."""
        kwargs.update(stream=True, allow_redirects=False)
        deadline = time.monotonic() + self._seconds
        response = super().request(*args, **kwargs)
        for again in range(1, TRIES):
            if response.status_code not in ASK_AGAIN_STATUSES or time.monotonic() > deadline:
                break
            response.close()
            time.sleep(again * PAUSE_SECONDS)
            response = super().request(*args, **kwargs)
        self.date = date_of(response.headers.get("Date"))
        body = bytearray()
        for chunk in response.iter_content(CHUNK_BYTES):
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                response.close()
                raise requests.RequestException(f"answer larger than {MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                response.close()
                raise requests.Timeout(f"answer took longer than {self._seconds:g} s")
        response._content = bytes(body)
        return response


def _lasting(*looks: list[Series]) -> list[list[Series]]:
    """The scrape times of Pods that each look has: one that came or went meanwhile was read in
    part, and counts as not scraped."""
    known = set.intersection(*({_pod(series) for series in look} for look in looks))
    return [[series for series in look if _pod(series) in known] for look in looks]


def _pod(series: Series) -> tuple[str | None, str | None]:
    return series.labels.get("namespace"), series.labels.get("pod")


def _cause(error: Exception) -> str:
    """What is behind an error of the client's layers, without the query's text and the addresses of
    objects, which differ each time and bury the cause."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, Exception):
            inner = next((a for a in error.args if isinstance(a, Exception)), None)
        if inner is None:
            break
        error = inner
    words = " ".join(str(a) for a in error.args) if error.args else type(error).__name__
    return re.sub(
        r"<[\w.]+ object at 0x[0-9a-f]+>:? ?|^HTTPS?Connection(Pool)?\([^)]*\): ", "", words
    )[:300]


def _series(query: str, answer: Any, what: str) -> list[Series]:
    if not isinstance(answer, list):
        raise PrometheusError(f"{what}: query {query} gave {type(answer).__name__}, not a vector")
    result: list[Series] = []
    shared: dict[tuple[tuple[str, str], ...], Labels] = {}
    texts: dict[str, str] = {}
    for entry in answer:
        try:
            metric = {str(k): str(v) for k, v in entry["metric"].items()}
            value = str(entry["value"][1])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise PrometheusError(
                f"{what}: query {query} gave no vector: {entry!r:.100}"
            ) from error
        pod = {name: metric.pop(name) for name in ("namespace", "pod") if name in metric}
        others = tuple(metric.items())
        labels = PodLabels(
            texts.setdefault(pod.get("namespace", ""), pod.get("namespace", "")),
            texts.setdefault(pod.get("pod", ""), pod.get("pod", "")),
            shared.setdefault(others, metric),
        )
        result.append(Series(query, labels, texts.setdefault(value, value)))
    return result
