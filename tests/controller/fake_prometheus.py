"""A Prometheus of a test's own: it scrapes replicas, answers our queries, and fails as it is told.

Its language is just what the operator's queries use, read from their text, so that a query that
lost a label or a matcher gives another answer here too. What real staleness markers, lookback and
label collisions do is asked of a real one (`test_prometheus`).
"""

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import cache

from aiohttp import web
from kvscaler.protocol.state import ReplicaState
from kvscaler_sidecar.metrics import StateCollector
from prometheus_client.utils import floatToGoString

from tests.controller.world import free_port

SCRAPE_SECONDS = 1.0
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Target = tuple[str, str, ReplicaState]
"""Namespace and Pod name, as service discovery knows them, and what the Pod exports."""


@dataclass(frozen=True)
class Stored:
    """One series with its last sample."""

    name: str
    labels: Mapping[str, str]
    value: float
    time: float


Edit = Callable[[list[Stored]], list[Stored]]


def vector(*entries: object) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": entries}})


class FakePrometheus:
    """Answers at `url`. With `answer` set, as that function does; else from what it scraped."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.asked = 0
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.targets: Callable[[], Iterable[Target]] = lambda: ()
        self.edit: Edit = lambda stored: stored
        """What relabelling, another exporter or a bug makes of the series."""
        self.scraping = True
        self.clock_seconds = 0.0
        """How far its clock is ahead."""
        self._stored: list[Stored] = []
        self._scraped_at = float("-inf")
        self._looks: dict[str, _Look] = defaultdict(_Look)
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FakePrometheus":
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self) -> None:
        """Accept connections."""
        if self._runner is not None:
            return
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def refuse(self) -> None:
        """Refuse connections, as a server that is not there."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def now(self) -> float:
        """Its clock."""
        return time.time() + self.clock_seconds

    def scrape(self) -> None:
        """Scrape all targets once."""
        stored: list[Stored] = []
        for namespace, pod, state in self.targets():
            at = self.now()
            target = {"namespace": namespace, "pod": pod, "job": "pods"}
            stored.append(Stored("up", target, 1.0, at))
            for family in StateCollector(lambda state=state: state, lambda: None).collect():
                stored += [
                    Stored(s.name, {**s.labels, **target}, s.value, at) for s in family.samples
                ]
        self._stored = stored
        self._scraped_at = time.monotonic()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.answer is not None:
            return await self.answer(request)
        return self.response(request.query["query"])

    def response(self, query: str) -> web.Response:
        """What a query gives now."""
        found = evaluate(query, self.edit(self._look(query)))
        entries = [
            {"metric": dict(labels), "value": [self.now(), floatToGoString(value)]}
            for labels, value in found
        ]
        return web.Response(
            text=vector(*entries), headers={"Date": formatdate(self.now(), usegmt=True)}
        )

    def _look(self, query: str) -> list[Stored]:
        """The series that a reader sees: one look for all queries of a pass, which begins and ends
        with a query for the scrape times. On a slow machine a pass takes longer than a scrape."""
        scope = re.search(r'namespace=~"([^"]*)"', query)
        look = self._looks[scope.group(1) if scope else ""]
        if "timestamp(" not in query:
            look.queries += 1
        elif look.queries:
            look.queries = 0
        else:
            if self.scraping and time.monotonic() - self._scraped_at >= SCRAPE_SECONDS:
                self.scrape()
            look.stored = self._stored
        return list(look.stored)


@dataclass
class _Look:
    stored: list[Stored] = field(default_factory=list)
    queries: int = 0


AGGREGATION = re.compile(r"(max|min) by \(([^)]*)\) \((.*)\)")
SELECTOR = re.compile(r"(\w*)(?:\{(.*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"((?:[^"\\]|\\.)*)"')


def evaluate(query: str, stored: Iterable[Stored]) -> list[tuple[dict[str, str], float]]:
    """`[max|min] by (labels) (selector or timestamp(selector)) [== number]`."""
    text, _, only = query.partition(" == ")
    found = AGGREGATION.fullmatch(text)
    assert found is not None, query
    operation, labels, inner = found.groups()
    stamped = inner.startswith("timestamp(")
    if stamped:
        inner = inner.removeprefix("timestamp(").removesuffix(")")
    groups: dict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
    wanted = labels.split(", ")
    for one in _selected(inner, stored):
        everything = {**one.labels, "__name__": one.name}
        key = tuple((n, everything[n]) for n in wanted if n in everything)
        groups[key].append(one.time if stamped else one.value)
    picked = {key: (max if operation == "max" else min)(values) for key, values in groups.items()}
    return [(dict(key), v) for key, v in picked.items() if not only or v == float(only)]


def _selected(selector: str, stored: Iterable[Stored]) -> Iterator[Stored]:
    parsed = SELECTOR.fullmatch(selector)
    assert parsed is not None, selector
    name, matchers = parsed.groups()
    wanted: list[tuple[str, Callable[[str], bool]]] = []
    if name:
        wanted.append(("__name__", lambda value: value == name))
    for label, operation, quoted in MATCHER.findall(matchers or ""):
        wanted.append((label, _matcher(operation, _unquoted(quoted))))
    for one in stored:
        if all(
            matches(one.name if label == "__name__" else one.labels.get(label, ""))
            for label, matches in wanted
        ):
            yield one


@cache
def _matcher(operation: str, text: str) -> Callable[[str], bool]:
    if operation == "=~":
        # Few names and namespaces are asked for again and again.
        pattern = re.compile(text)
        return cache(lambda value: pattern.fullmatch(value) is not None)
    return lambda value: (value == text) == (operation == "=")


def _unquoted(text: str) -> str:
    return text.replace('\\"', '"').replace("\\\\", "\\")


def valued(value: float) -> Edit:
    """Every sample but `up` has this value."""
    return lambda stored: [s if s.name == "up" else replace(s, value=value) for s in stored]


def renamed(old: str, new: str) -> Edit:
    """Names that begin with `old` begin with `new`."""
    return lambda stored: [
        replace(s, name=new + s.name.removeprefix(old)) if s.name.startswith(old) else s
        for s in stored
    ]


def relabelled(**names: str) -> Edit:
    """Labels under other names."""
    return lambda stored: [
        replace(s, labels={names.get(k, k): v for k, v in s.labels.items()}) for s in stored
    ]


def without(unwanted: Callable[[Stored], bool]) -> Edit:
    """Only the other series."""
    return lambda stored: [s for s in stored if not unwanted(s)]


def aged(seconds: float) -> Edit:
    """Every sample is older."""
    return lambda stored: [replace(s, time=s.time - seconds) for s in stored]


async def empty(_: web.Request) -> web.Response:
    return web.Response(text=vector())


async def hang(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def overloaded(_: web.Request) -> web.Response:
    return web.Response(status=503, text="busy")
