"""How long until a traffic spike is answered: by each signal path, and with Prometheus down.

On the local cluster, with the chart, the real model and the service of `examples/smollm2.yaml`. A
spike that needs 2.5 replicas' worth of KV blocks is sent to one replica, and the time is taken from
the arrival of the spike's first request until `spec.replicas` grows and until a new Pod is Ready.
Each round is a service of its own, so that no round knows of the one before.

Times to the patch are medians of the rounds, since arrivals are a Poisson stream, and the slowest
round is told beside them; a Pod's start is the slowest one. Only the first round of a case goes on
until a new Pod is Ready. Before the spikes the same service is started with one CPU on the idle
cluster, for the time from the container's start to Ready. Everything that was installed is removed
at the end, and a cluster that was not up before is taken down.
"""

import argparse
import asyncio
import copy
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import harness
from harness import ROOT, Figure, progress

for _folder in (ROOT, ROOT / "hack" / "cluster"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from localcluster import lifecycle  # noqa: E402
from localcluster.layout import DEFAULT_NAME  # noqa: E402

from hack.demo.kube import Kube  # noqa: E402 - a clone runs without being installed
from hack.demo.observe import Observer, Sample  # noqa: E402
from hack.demo.prometheus import Prometheus  # noqa: E402
from hack.demo.report import Phase, scale_up, start_seconds  # noqa: E402
from hack.demo.run import (  # noqa: E402
    CALM_SHARE,
    NAMESPACE,
    READY_DEADLINE_SECONDS,
    RELEASE,
    SPIKE_SHARE,
    SYSTEM_NAMESPACE,
    Demo,
    DemoError,
)
from hack.demo.speed import measure_speed  # noqa: E402
from hack.demo.traffic import Request, Result, Shape, Traffic  # noqa: E402

CALM_SECONDS = 40.0  # as in the demo: the level that a spike stands out from is known by then
PATCH_DEADLINE_SECONDS = 60.0
READY_AFTER_SECONDS = 90.0
IDLE_STARTS = 3
POLL_SECONDS = 0.1
SPIKE = "spike"


@dataclass(frozen=True)
class Case:
    """What the operator may read, and whether Prometheus dies before the spike."""

    name: str
    signal_paths: str
    prometheus_down: bool
    floor: str
    aim: str | None


CASES = (
    Case("direct", "direct,prometheus", False, "<= 6", "<= 3"),
    Case("prometheus_only", "prometheus", False, "<= 15", None),
    Case("prometheus_down", "direct,prometheus", True, "<= 6", "<= 3"),
)


@dataclass
class Round:
    """One spike. Times are seconds since its first request arrived; `None` is never."""

    case: str
    rate_per_second: float
    to_patch_seconds: float | None = None
    waited_for_ready: bool = False
    to_new_pod_ready_seconds: float | None = None
    pod_start_seconds: float | None = None
    """From the first sight of the new Pod until it was Ready."""
    replicas: int | None = None
    binding_constraint: str | None = None
    message: str | None = None
    signals: str = ""
    """What the service said about its signals when the spike began."""
    arrivals_before_patch: int = 0
    requests: Mapping[str, int] = field(default_factory=dict)
    """By result, over calm and spike; those still open at the end are apart."""


class Reaction(Demo):
    """The demo's parts, put together for spikes alone."""

    def __init__(self, out: Path, rounds: int) -> None:
        super().__init__(ROOT, out, CALM_SECONDS, READY_AFTER_SECONDS, "", False, False)
        self.rounds = rounds
        self.idle_starts_seconds: list[float] = []
        self.speed: dict[str, float] = {}

    async def measure(self) -> list[Round]:
        """All cases, `rounds` times each."""
        self.out.mkdir(parents=True, exist_ok=True)
        place = json.loads(self._output("hack/cluster/status", "--json"))
        binary = Path(self._output("hack/cluster/binary", "prometheus-2").splitlines()[-1])
        done: list[Round] = []
        async with Kube(ROOT / "build/cluster/kubeconfig") as kube:
            with self._step(f"{IDLE_STARTS} starts with one CPU on the idle cluster"):
                self.signal_paths = "direct"
                self._install("http://127.0.0.1:9090")
                for number in range(1, IDLE_STARTS + 1):
                    self.name = f"idle-{number}"
                    self.idle_starts_seconds.append(await self._idle_start(kube))
            for case in CASES:
                self.signal_paths = case.signal_paths
                for number in range(1, self.rounds + 1):
                    folder = self.out / f"prometheus-{case.name}-{number}"
                    prometheus = Prometheus(
                        binary, folder, Path(place["networkNamespace"]), place["nodeAddress"]
                    )
                    with prometheus, self._step(f"{case.name}, round {number}"):
                        self._install(prometheus.url)
                        self.name = f"{case.name}-{number}".replace("_", "-")
                        seed = len(done) + 1
                        done.append(await self._round(kube, prometheus, case, seed, number == 1))
                        progress(f"  {_told(done[-1])}")
                    shutil.rmtree(folder)
        return done

    async def _round(
        self, kube: Kube, prometheus: Prometheus, case: Case, seed: int, to_ready: bool
    ) -> Round:
        observer = Observer(kube, NAMESPACE, self.name)
        observer.on_sample = lambda sample: _scrape(prometheus, sample)
        service = copy.deepcopy(self.example)
        service["metadata"] = {"name": self.name, "namespace": NAMESPACE}
        self._apply(service)
        watcher = asyncio.create_task(observer.run())
        try:
            await self._until(
                "the service has a ready Pod", lambda: _ready(observer), READY_DEADLINE_SECONDS
            )
            if not self.speed:
                self.speed = await self._measured_speed(kube)
            return await self._spike(kube, prometheus, case, observer, seed, to_ready)
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            self._remove_service()

    async def _idle_start(self, kube: Kube) -> float:
        """Seconds from the start of the container until its Pod was seen Ready, with one CPU.

        The start is told in whole seconds, rounded down: the figure is up to a second too long.
        """
        service = copy.deepcopy(self.example)
        service["metadata"] = {"name": self.name, "namespace": NAMESPACE}
        (engine,) = service["spec"]["template"]["spec"]["containers"]
        engine["resources"]["limits"]["cpu"] = "1"
        observer = Observer(kube, NAMESPACE, self.name)
        took: list[float] = []

        async def ready() -> bool:
            sample = await observer.sample()
            took[:] = [
                time.time() - datetime.fromisoformat(pod.started_at).timestamp()
                for pod in sample.pods
                if pod.ready and pod.started_at
            ]
            return bool(took)

        self._apply(service)
        try:
            await self._until("the service has a ready Pod", ready, READY_DEADLINE_SECONDS)
        finally:
            self._remove_service()
        progress(f"  Ready {took[0]:.1f} s after the container's start")
        return round(took[0], 1)

    async def _measured_speed(self, kube: Kube) -> dict[str, float]:
        """Of a replica of its own, so that no round's service has seen the measurement."""
        probe = self._speed_probe()
        observer = Observer(kube, NAMESPACE, probe["metadata"]["name"])
        self._apply(probe)

        async def ready() -> bool:
            observer.samples[:] = [await observer.sample()]
            return observer.samples[-1].ready > 0

        await self._until("the measured replica is ready", ready, READY_DEADLINE_SECONDS)
        (pod,) = observer.samples[-1].pods
        speed: dict[str, float] = await measure_speed(kube, str(pod.ip), self._served_name())
        self._delete(probe["metadata"]["name"])
        return speed

    async def _spike(
        self,
        kube: Kube,
        prometheus: Prometheus,
        case: Case,
        observer: Observer,
        seed: int,
        to_ready: bool,
    ) -> Round:
        per_second = self.speed["requests_per_second_that_fill_one_replica"]
        made = Round(case.name, SPIKE_SHARE * per_second)
        address = await self._service_address(kube)
        traffic = Traffic(f"http://{address}:8000", self._served_name(), Shape(), seed)
        generator = asyncio.create_task(traffic.run())
        try:
            traffic.set_phase("calm", CALM_SHARE * per_second)
            if case.prometheus_down:
                prometheus.stop()
            await asyncio.sleep(CALM_SECONDS)
            made.signals = _condition(observer.samples[-1], "SignalsFresh")
            traffic.set_phase(SPIKE, made.rate_per_second)
            await self._until("the spike has begun", lambda: _begun(traffic), 60)
            first = _first(traffic)
            before = observer.samples[-1].desired or 1
            patched = await _patched(kube, observer.service_path, before)
            if patched is not None:
                made.to_patch_seconds = round(patched - first, 2)
                made.arrivals_before_patch = sum(
                    1 for r in traffic.requests if r.phase == SPIKE and r.offered_at < patched
                )
                seen = _grown if to_ready else _decided
                await self._until(
                    "the spike is answered", lambda: seen(observer), READY_AFTER_SECONDS, fail=False
                )
            made.waited_for_ready = to_ready
            _fill(made, observer, Phase(SPIKE, first, time.monotonic(), made.rate_per_second))
        finally:
            # The service goes now, and with it what is still open.
            made.requests = _results(traffic.requests)
            traffic.set_phase("over", 0.0)
            generator.cancel()
            await traffic.abandon()
            await asyncio.gather(generator, return_exceptions=True)
        return made

    def _remove_service(self) -> None:
        self._delete(self.name)
        # Nobody listens any more: a drain would only take the next round's CPU time.
        self._tool("hack/cluster/kubectl", "delete", "pods", "--all", "-n", NAMESPACE,
                   "--force", "--grace-period=0", "--wait=false")  # fmt: skip

    def _delete(self, name: str) -> None:
        self._tool("hack/cluster/kubectl", "delete", "kvis", name, "-n", NAMESPACE,
                   "--ignore-not-found", "--timeout=60s")  # fmt: skip

    def clean(self, cluster_was_up: bool) -> None:
        """Remove what was installed, and the cluster if it was brought up for this."""
        if not cluster_was_up:
            self._tool("hack/cluster/down")
            return
        self._tool("hack/cluster/kubectl", "delete", "namespace", NAMESPACE, "--timeout=90s",
                   "--ignore-not-found")  # fmt: skip
        self._tool("hack/cluster/helm", "uninstall", RELEASE, "-n", SYSTEM_NAMESPACE,
                   "--ignore-not-found")  # fmt: skip


def _scrape(prometheus: Prometheus, sample: Sample) -> None:
    prometheus.set_targets(
        NAMESPACE, {pod.name: pod.ip for pod in sample.pods if pod.ip and not pod.terminating}
    )


async def _ready(observer: Observer) -> bool:
    return bool(observer.samples) and observer.samples[-1].ready > 0


async def _grown(observer: Observer) -> bool:
    return observer.samples[-1].ready > 1


async def _decided(observer: Observer) -> bool:
    """Whether status has the decision that the patch came from: it is written after it."""
    last = observer.samples[-1]
    decision = ((last.service or {}).get("status") or {}).get("decision") or {}
    return (last.desired or 1) > 1 and decision.get("desiredReplicas", 1) > 1


async def _begun(traffic: Traffic) -> bool:
    return any(r.phase == SPIKE for r in traffic.requests)


def _first(traffic: Traffic) -> float:
    return next(r.offered_at for r in traffic.requests if r.phase == SPIKE)


async def _patched(kube: Kube, path: str, before: int) -> float | None:
    """When `spec.replicas` was first seen above `before`, on the monotonic clock."""
    deadline = time.monotonic() + PATCH_DEADLINE_SECONDS
    while time.monotonic() < deadline:
        service = await kube.get(path)
        if service["spec"].get("replicas", 1) > before:
            return time.monotonic()
        await asyncio.sleep(POLL_SECONDS)
    return None


def _condition(sample: Sample, kind: str) -> str:
    status = (sample.service or {}).get("status") or {}
    found = next((c for c in status.get("conditions", ()) if c["type"] == kind), None)
    return f"{found['status']}/{found['reason']}" if found else ""


def _fill(made: Round, observer: Observer, spike: Phase) -> None:
    answer = scale_up(observer.samples, spike)
    made.to_new_pod_ready_seconds = answer["to_new_pod_ready_seconds"]
    made.binding_constraint, made.message = answer["binding_constraint"], answer["message"]
    made.replicas = observer.samples[-1].desired
    old = {pod.name for s in observer.samples if s.at < spike.begin for pod in s.pods}
    starts = [took for name, took in start_seconds(observer).items() if name not in old]
    made.pod_start_seconds = min(starts, default=None)


def _results(requests: Sequence[Request]) -> dict[str, int]:
    counts = {result.value: sum(1 for r in requests if r.result is result) for result in Result}
    return counts | {"open": sum(1 for r in requests if r.result is None)}


def _told(made: Round) -> str:
    return (
        f"patch after {made.to_patch_seconds} s ({made.binding_constraint}, {made.replicas} "
        f"replicas), a new Pod Ready after {made.to_new_pod_ready_seconds} s"
    )


def _figure(
    name: str,
    values: Sequence[float | None],
    of: Callable[[list[float]], float],
    floor: str | None = None,
    aim: str | None = None,
) -> Figure:
    """`of` the seconds of all rounds; no value, with the reason, when a round had no answer."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        why = f"{len(values) - len(known)} of {len(values)} rounds had no answer in time"
        return Figure(name, None, "s", floor, aim, why=why)
    why = f"{len(known)} rounds, fastest {min(known)} s, slowest {max(known)} s"
    return Figure(name, of(known), "s", floor, aim, why=why)


def figures(rounds: Sequence[Round], idle_starts: Sequence[float]) -> list[Figure]:
    """The figures with their floors."""
    out = [
        _figure(
            f"spike_to_patch_{case.name}",
            [r.to_patch_seconds for r in rounds if r.case == case.name],
            statistics.median,
            case.floor,
            case.aim,
        )
        for case in CASES
    ]
    whole = [r for r in rounds if r.waited_for_ready]
    starts = [r.pod_start_seconds for r in whole]
    ready = [r.to_new_pod_ready_seconds for r in whole]
    return [
        *out,
        _figure("container_to_ready_with_one_cpu", idle_starts, max, "<= 10"),
        _figure("new_pod_to_ready_in_the_spike", starts, max, "<= 45"),
        _figure("spike_to_new_pod_ready", ready, statistics.median),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the report."""
    parser: argparse.ArgumentParser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="spikes per case (default 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reaction")
    options = parser.parse_args(argv)
    bench = Reaction(options.out, options.rounds)
    was_up = lifecycle.is_up(ROOT, DEFAULT_NAME)
    try:
        bench._tool("hack/cluster/up")
        bench._tool("hack/images/build", "--import")
        rounds = asyncio.run(bench.measure())
    except (DemoError, subprocess.CalledProcessError) as error:
        progress(f"reaction: {error}")
        return 2
    finally:
        bench.clean(was_up)
    detail = {
        "rounds": [vars(r) for r in rounds],
        "idle_starts_seconds": bench.idle_starts_seconds,
        "speed": bench.speed,
        "steps_seconds": bench.steps,
    }
    measured = figures(rounds, bench.idle_starts_seconds)
    return harness.report("reaction", measured, detail, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
