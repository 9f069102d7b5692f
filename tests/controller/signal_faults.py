"""Everything that can go wrong between a replica's load and the operator, as two tables.

Each row: how the fault is made, and what status must say while it lasts, with the other path alive
and without. That replicas stay what they are, and that all is well by itself once the fault is
over, holds for every row.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from aiohttp import web
from kvscaler.protocol.state import OccupancyReport, TrafficCounters

from tests.controller import fake_prometheus as fake
from tests.controller.fake_prometheus import FakePrometheus, Stored
from tests.controller.sidecars import BLOCKS, OWN_LIMITS, FakeSidecar
from tests.controller.world import World

HELD_BLOCKS = 180
"""Live blocks of each replica, of 190 that may be used: too many for one replica fewer of up to
ten, so the fleet must neither shrink nor grow. Read as zero, they would let it shrink at once."""
DAY_SECONDS = 86_400.0


@dataclass
class Scene:
    """Services that one fault meets at once. `alone` sees its replicas through Prometheus only,
    `beside` on both paths, `direct` only by asking them."""

    prometheus: FakePrometheus
    alone: World
    beside: World
    direct: World

    @property
    def worlds(self) -> tuple[World, World, World]:
        return self.alone, self.beside, self.direct

    def victims(self) -> list[FakeSidecar]:
        """The first replica of the services whose replicas are asked."""
        return [world.sidecars[sorted(world.sidecars)[0]] for world in (self.beside, self.direct)]

    async def heal(self) -> None:
        """Take every fault away."""
        server = self.prometheus
        server.answer, server.edit, server.scraping = None, list, True
        server.clock_seconds = 0.0
        await server.listen()
        for world in self.worlds:
            for sidecar in world.sidecars.values():
                sidecar.raw, sidecar.hang, sidecar.redirect = None, False, False
                sidecar.status, sidecar.endless, sidecar.clock_seconds = 200, False, 0.0
                busy(sidecar)


def busy(sidecar: FakeSidecar) -> None:
    """A replica whose requests hold `HELD_BLOCKS`, and that has worked before."""
    assert sidecar.state is not None and sidecar.state.capacity is not None
    occupancy = OccupancyReport(
        capacity_blocks=BLOCKS,
        referenced_blocks=HELD_BLOCKS,
        reserved_blocks=HELD_BLOCKS,
        cached_blocks=0,
        free_blocks=BLOCKS - HELD_BLOCKS,
        running_requests=10,
        waiting_requests=0,
        waiting_tokens=0,
        waiting_blocks=0,
    )
    capacity = sidecar.state.capacity.model_copy(update={"kv_blocks": BLOCKS})
    traffic = TrafficCounters(steps=100_000, step_seconds=5_000.0, decode_tokens=1_000_000)
    sidecar.set(occupancy=occupancy, capacity=capacity, traffic=traffic)


Make = Callable[[Scene], Awaitable[None]]
Verdict = tuple[str, str]
"""Status and reason of SignalsFresh."""

FRESH: Verdict = ("True", "Fresh")
UNREACHABLE: Verdict = ("True", "PrometheusUnreachable")
UNUSABLE: Verdict = ("True", "PrometheusUnusable")


@dataclass(frozen=True)
class PrometheusFault:
    """What Prometheus does, and SignalsFresh where it is the only path, and beside the direct one.

    `says` is a part of the message where it is the only path.
    """

    name: str
    make: Make
    alone: Verdict
    beside: Verdict
    says: str = ""


@dataclass(frozen=True)
class SidecarFault:
    """What one replica's sidecar does, and SignalsFresh where replicas are only asked, and where
    Prometheus carries on. `says` is a part of the message where they are only asked."""

    name: str
    make: Make
    direct: Verdict
    beside: Verdict
    says: str = ""


def answering(answer: fake.Answer) -> Make:
    async def make(scene: Scene) -> None:
        scene.prometheus.answer = answer

    return make


def editing(edit: Callable[[Scene], fake.Edit]) -> Make:
    async def make(scene: Scene) -> None:
        scene.prometheus.edit = edit(scene)

    return make


async def refuse(scene: Scene) -> None:
    await scene.prometheus.refuse()


async def by_turns(scene: Scene) -> None:
    """Every query is refused every other time: a balancer before two servers, one of them dead."""
    seen: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.StreamResponse:
        query = request.query["query"]
        seen[query] += 1
        if seen[query] % 2:
            return await fake.overloaded(request)
        return scene.prometheus.response(query)

    scene.prometheus.answer = answer


async def five_minutes_old(scene: Scene) -> None:
    scene.prometheus.scraping = False
    scene.prometheus.edit = fake.aged(300.0)


async def clock_ahead_then_silent(scene: Scene) -> None:
    """A server whose clock is a day ahead, and that stops scraping: its last scrape is no news."""
    scene.prometheus.clock_seconds = DAY_SECONDS
    scene.prometheus.scrape()
    scene.prometheus.scraping = False


def clock(seconds: float) -> Make:
    async def make(scene: Scene) -> None:
        scene.prometheus.clock_seconds = seconds
        scene.prometheus.scrape()

    return make


def every_second_pod(scene: Scene) -> fake.Edit:
    names = {pod for world in scene.worlds for pod in sorted(world.sidecars)[::2]}
    return fake.without(lambda s: s.labels.get("pod") in names)


def every_second_name(_: Scene) -> fake.Edit:
    return fake.without(lambda s: s.name.startswith("kvscaler_") and len(s.name) % 2 == 1)


def twice(_: Scene) -> fake.Edit:
    """Each series once more, by another process of the same Pod that says the same."""

    def edit(stored: list[Stored]) -> list[Stored]:
        return [replace(s, labels={**s.labels, "process": p}) for s in stored for p in ("1", "2")]

    return edit


def former_process(_: Scene) -> fake.Edit:
    """Each series once more, by the process before the last restart, which counted far more."""

    def edit(stored: list[Stored]) -> list[Stored]:
        former = []
        for s in stored:
            value = s.value
            if s.name == "kvscaler_start_time_seconds":
                value -= 3600.0
            elif s.name.endswith("_total"):
                value += 1_000_000.0
            former.append(replace(s, value=value, labels={**s.labels, "job": "again"}))
        return stored + former

    return edit


def reset(_: Scene) -> fake.Edit:
    return lambda stored: [
        replace(s, value=s.value / 2) if s.name.endswith("_total") else s for s in stored
    ]


def claims(scene: Scene, *, honored: bool) -> fake.Edit:
    """A stranger's Pod exports our metrics, full to the brim, with labels of our Pods."""
    pods = [(w.namespace, pod) for w in scene.worlds for pod in w.sidecars]

    def edit(stored: list[Stored]) -> list[Stored]:
        forged = []
        for namespace, pod in pods:
            for s in stored:
                if (s.labels["namespace"], s.labels["pod"]) != (namespace, pod):
                    continue
                exported = {"exported_namespace": namespace, "exported_pod": pod}
                labels = {**s.labels, "namespace": "stranger", "pod": "mallory", **exported}
                if honored:
                    labels = {**s.labels, "instance": "mallory"}
                forged.append(replace(s, labels=labels, value=s.value + 5_000.0))
        return stored + [s for s in forged if s.name != "up"]

    return edit


PROMETHEUS_FAULTS = (
    PrometheusFault(
        "refuses connections",
        refuse,
        ("False", "PrometheusUnreachable"),
        UNREACHABLE,
        "refused",
    ),
    PrometheusFault(
        "accepts and never answers",
        answering(fake.hang),
        ("False", "PrometheusUnreachable"),
        UNREACHABLE,
        "timed out",
    ),
    PrometheusFault(
        "answers 503",
        answering(fake.overloaded),
        ("False", "PrometheusUnreachable"),
        UNREACHABLE,
        "503",
    ),
    PrometheusFault("answers 503 by turns", by_turns, FRESH, FRESH),
    PrometheusFault(
        "answers empty",
        answering(fake.empty),
        ("False", "MetricsStale"),
        FRESH,
        "no kvscaler_ready",
    ),
    PrometheusFault(
        "answers NaN",
        editing(lambda _: fake.valued(float("nan"))),
        ("False", "MetricsNotANumber"),
        UNUSABLE,
        "is NaN",
    ),
    PrometheusFault(
        "answers +Inf",
        editing(lambda _: fake.valued(float("inf"))),
        ("False", "MetricsNotANumber"),
        UNUSABLE,
        "is +Inf",
    ),
    PrometheusFault(
        "is stale by 5 minutes", five_minutes_old, ("False", "MetricsStale"), FRESH, "last seen"
    ),
    PrometheusFault(
        "has half of the Pods",
        editing(every_second_pod),
        ("False", "MetricsPartial"),
        FRESH,
        "2 of 3 ready replicas are not observed",
    ),
    PrometheusFault(
        "has half of each Pod's series",
        editing(every_second_name),
        ("False", "MetricsPartial"),
        UNUSABLE,
    ),
    PrometheusFault("has each series twice", editing(twice), FRESH, FRESH),
    PrometheusFault(
        "mixes series of two processes",
        editing(former_process),
        ("False", "MetricsMismatched"),
        UNUSABLE,
        "two processes",
    ),
    PrometheusFault(
        "has one metric under another name",
        editing(lambda _: fake.renamed("kvscaler_requests_arrived", "kvscaler_arrivals")),
        ("False", "MetricsPartial"),
        UNUSABLE,
        "no series of kvscaler_requests_arrived_total",
    ),
    PrometheusFault(
        "has all metrics under other names",
        editing(lambda _: fake.renamed("kvscaler_", "vllm:")),
        ("False", "MetricsStale"),
        FRESH,
        "no kvscaler_ready",
    ),
    PrometheusFault(
        "has counters that ran back",
        editing(reset),
        ("False", "MetricsMismatched"),
        FRESH,
        "ran back",
    ),
    PrometheusFault(
        "has other labels",
        editing(lambda _: fake.relabelled(namespace="kubernetes_namespace", pod="pod_name")),
        ("False", "MetricsStale"),
        FRESH,
        "target labels namespace and pod",
    ),
    PrometheusFault(
        "has exported labels that claim our namespace",
        editing(lambda scene: claims(scene, honored=False)),
        FRESH,
        FRESH,
    ),
    PrometheusFault(
        "honors labels that claim our Pods",
        editing(lambda scene: claims(scene, honored=True)),
        ("False", "MetricsMismatched"),
        UNUSABLE,
        "honor_labels",
    ),
    PrometheusFault("has tomorrow's clock", clock(DAY_SECONDS), FRESH, FRESH),
    PrometheusFault("has yesterday's clock", clock(-DAY_SECONDS), FRESH, FRESH),
    PrometheusFault(
        "has tomorrow's clock and stops scraping",
        clock_ahead_then_silent,
        ("False", "MetricsStale"),
        FRESH,
        "last seen",
    ),
)


def each(change: Callable[[FakeSidecar], object]) -> Make:
    async def make(scene: Scene) -> None:
        for sidecar in scene.victims():
            change(sidecar)

    return make


def setting(**values: object) -> Make:
    def change(sidecar: FakeSidecar) -> None:
        for name, value in values.items():
            assert hasattr(sidecar, name)
            setattr(sidecar, name, value)

    return each(change)


def sized(blocks: int) -> Make:
    """A replica that says that its pool has `blocks`, all in use but one."""

    def change(sidecar: FakeSidecar) -> None:
        assert sidecar.state is not None
        assert sidecar.state.capacity is not None and sidecar.state.occupancy is not None
        update = {"capacity_blocks": blocks, "referenced_blocks": blocks - 1, "free_blocks": 1}
        occupancy = {**update, "reserved_blocks": blocks - 1}
        sidecar.set(
            capacity=sidecar.state.capacity.model_copy(update={"kv_blocks": blocks}),
            occupancy=sidecar.state.occupancy.model_copy(update=occupancy),
        )

    return each(change)


def restarted_yesterday(sidecar: FakeSidecar) -> None:
    """A container that starts again on a node whose clock was set back by a day."""
    assert sidecar.state is not None
    sidecar.clock_seconds = -DAY_SECONDS
    sidecar.set(started_at=sidecar.state.started_at - DAY_SECONDS, traffic=TrafficCounters())


def restarted(sidecar: FakeSidecar) -> None:
    assert sidecar.state is not None
    sidecar.set(started_at=time.time(), traffic=TrafficCounters())


PARTIAL: Verdict = ("False", "MetricsPartial")
SIDECAR_FAULTS = (
    SidecarFault("hangs", setting(hang=True), PARTIAL, FRESH, "no answer within"),
    SidecarFault("answers 404", setting(status=404), PARTIAL, FRESH, "answered 404"),
    SidecarFault("answers 302", setting(redirect=True), PARTIAL, FRESH, "redirects are not"),
    SidecarFault("answers 1 GB", setting(endless=True), PARTIAL, FRESH, "more than 64 KiB"),
    SidecarFault(
        "answers garbage", setting(raw=b"\x00\xff"), PARTIAL, FRESH, "sent no ReplicaState"
    ),
    SidecarFault("answers NaN", setting(raw=b'{"traffic": NaN}'), PARTIAL, FRESH, "NaN"),
    SidecarFault("starts again: its counters too", each(restarted), FRESH, FRESH),
    SidecarFault("has yesterday's clock", setting(clock_seconds=-DAY_SECONDS), FRESH, FRESH),
    SidecarFault("has tomorrow's clock", setting(clock_seconds=DAY_SECONDS), FRESH, FRESH),
    SidecarFault("starts again with yesterday's clock", each(restarted_yesterday), FRESH, FRESH),
    SidecarFault(
        "claims a pool 50 times too small",
        sized(BLOCKS // 50),
        PARTIAL,
        PARTIAL,
        "reports 4 KV blocks",
    ),
    SidecarFault(
        "claims a pool 50 times too large",
        sized(BLOCKS * 50),
        PARTIAL,
        PARTIAL,
        "reports 10000 KV blocks",
    ),
)


def own_limits(sidecar: FakeSidecar) -> None:
    """A replica that enforces what it computed itself, as after a start."""
    sidecar.limits = sidecar.limits.model_copy(
        update={
            "hash": OWN_LIMITS.content_hash,
            "applied": OWN_LIMITS,
            "requested_hash": None,
            "clamped": (),
        }
    )
