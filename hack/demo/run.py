"""The demo from an empty machine to a report: each step real, named and timed."""

import asyncio
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from kvscaler_api.quantities import parse_duration

from hack.demo import plot, report
from hack.demo.kube import Kube
from hack.demo.modelled import ClientLag, card_of, check_model, chunks_per_second, modelled_speed
from hack.demo.observe import Observer, Sample
from hack.demo.profile import DEMO, Profile
from hack.demo.prometheus import Prometheus
from hack.demo.report import Objectives, Phase
from hack.demo.speed import measure_speed
from hack.demo.traffic import Result, Traffic
from hack.demo.view import View, say
from hack.demo.writes import operator_writes, since

NAMESPACE = "kvscaler-demo"
SYSTEM_NAMESPACE = "kvscaler-system"
RELEASE = "kvscaler"
CALM_SHARE = DEMO.calm_share
"""Calm traffic, as a share of the rate that fills one replica's blocks."""
SPIKE_SHARE = DEMO.spike_share
"""The spike, in replicas' worth of KV blocks."""
READY_DEADLINE_SECONDS = 180.0
IDLE_SECONDS = 10.0


class DemoError(Exception):
    """The demo can't go on: the message says what was waited for and what to look at."""


class Demo:
    """One run. Everything that it starts it also ends, unless told to keep it."""

    def __init__(self, tree: Path, out: Path, calm_seconds: float, spike_seconds: float,
                 signal_paths: str, stop_prometheus: bool, keep: bool,
                 profile: Profile = DEMO) -> None:  # fmt: skip
        self.tree, self.out = tree, out
        self.calm_seconds, self.spike_seconds = calm_seconds, spike_seconds
        self.signal_paths, self.stop_prometheus = signal_paths, stop_prometheus
        self.keep = keep
        self.steps: dict[str, float] = {}
        self.cluster_was_up = False
        self.profile = profile
        self.lag = ClientLag()
        self.example = yaml.safe_load((tree / "examples" / profile.example).read_text("utf-8"))
        self.name: str = self.example["metadata"]["name"]

    async def run(self) -> dict[str, Any]:
        """Run everything; returns the report (also drawn into `out`)."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.cluster_was_up = self._cluster_is_up()
        with self._step("cluster"):
            self._tool("hack/cluster/up")
            place = json.loads(self._output("hack/cluster/status", "--json"))
        with self._step("images"):
            self._tool("hack/images/build", "--import")
        prometheus_binary = Path(
            self._output("hack/cluster/binary", "prometheus-2").splitlines()[-1]
        )
        prometheus = Prometheus(
            prometheus_binary, self.out / "prometheus",
            Path(place["networkNamespace"]), place["nodeAddress"],
        )  # fmt: skip
        try:
            with prometheus:
                with self._step("helm install"):
                    self._install(prometheus.url)
                async with Kube(self.tree / "build/cluster/kubeconfig") as kube:
                    return await self._traffic(kube, prometheus)
        finally:
            if not self.keep:
                with self._step("clean up"):
                    self._remove()

    # --- steps -------------------------------------------------------------------------------

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        say(f"▸ {name}")
        began = time.monotonic()
        yield
        self.steps[name] = round(time.monotonic() - began, 1)
        say(f"✓ {name} ({self.steps[name]} s)")

    def _tool(self, *command: str, text: str | None = None) -> None:
        environment = os.environ | {"PYTHON": sys.executable, "PYTHON_BIN": sys.executable}
        subprocess.run(
            [str(self.tree / command[0]), *command[1:]], check=True, cwd=self.tree,
            env=environment, input=text, text=True, stdout=sys.stderr,
        )  # fmt: skip

    def _output(self, *command: str) -> str:
        environment = os.environ | {"PYTHON": sys.executable, "PYTHON_BIN": sys.executable}
        return subprocess.run(
            [str(self.tree / command[0]), *command[1:]], check=True, cwd=self.tree,
            env=environment, text=True, stdout=subprocess.PIPE,
        ).stdout.strip()  # fmt: skip

    def _install(self, prometheus_url: str) -> None:
        images = dict(
            line.split("=", 1)
            for line in (self.tree / "build/images.env").read_text().splitlines()
            if "=" in line
        )
        operator, sidecar = (images[key].rsplit(":", 1) for key in
                             ("OPERATOR_IMAGE", "SIDECAR_IMAGE"))  # fmt: skip
        self._tool(
            "hack/cluster/helm", "upgrade", "--install", RELEASE, "charts/kvscaler",
            "--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s",
            "--set", f"image.repository={operator[0]},image.tag={operator[1]}",
            "--set", f"sidecar.image.repository={sidecar[0]},sidecar.image.tag={sidecar[1]}",
            "--set-string", f"prometheus.servers.default.url={prometheus_url}",
            "--set-string", "signals.paths=" + self.signal_paths.replace(",", "\\,"),
        )  # fmt: skip
        self._apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})

    def _apply(self, *objects: dict[str, Any]) -> None:
        text = "\n---\n".join(json.dumps(item) for item in objects)
        self._tool("hack/cluster/kubectl", "apply", "-f", "-", text=text)

    def _remove(self) -> None:
        """A cluster that the demo brought up goes with all in it; another loses the demo only."""
        if not self.cluster_was_up:
            self._tool("hack/cluster/down")
            return
        with suppress(subprocess.CalledProcessError):
            self._tool("hack/cluster/kubectl", "delete", "namespace", NAMESPACE, "--wait=false",
                       "--ignore-not-found")  # fmt: skip
            self._tool("hack/cluster/helm", "uninstall", RELEASE, "-n", SYSTEM_NAMESPACE)

    def _cluster_is_up(self) -> bool:
        command = [str(self.tree / "hack/cluster/status"), "--json"]
        environment = os.environ | {"PYTHON": sys.executable}
        asked = subprocess.run(command, env=environment, capture_output=True, check=False)
        return asked.returncode == 0

    # --- the service and its traffic ---------------------------------------------------------

    async def _traffic(self, kube: Kube, prometheus: Prometheus) -> dict[str, Any]:
        self._remove_old_services()
        observer = Observer(kube, NAMESPACE, self.name, period_seconds=self.profile.sample_seconds)
        with self._step("service Ready"):
            speed, watcher = await self._start_service(kube, observer)
        say(f"  one replica serves {speed['requests_per_second']:.2f} requests/s "
            f"with its pool full ({speed['output_tokens_per_second']:.1f} tokens/s)")  # fmt: skip

        address = await self._service_address(kube)
        traffic = Traffic(
            f"http://{address}:8000", self._served_name(), self.profile.shape,
            request_timeout_seconds=self.profile.request_timeout_seconds,
        )  # fmt: skip
        start = time.monotonic()
        phases: list[Phase] = []
        with View(traffic, start, self.profile.title) as view:

            def on_sample(sample: Sample) -> None:
                view.show(sample)
                prometheus.set_targets(
                    NAMESPACE, {p.name: p.ip for p in sample.pods if p.ip and not p.terminating}
                )

            observer.on_sample = on_sample
            lag = asyncio.create_task(self.lag.watch())
            generator = asyncio.create_task(traffic.run())
            full = speed["requests_per_second_that_fill_one_replica"]
            calm, spike = self.profile.calm_share * full, self.profile.spike_share * full
            for name, rate, seconds in (("calm", calm, self.calm_seconds),
                                        ("spike", spike, self.spike_seconds)):  # fmt: skip
                if name == "spike" and self.stop_prometheus:
                    prometheus.stop()
                await self._phase(traffic, phases, name, rate, seconds)
            begin = time.monotonic()
            traffic.set_phase("calm again", calm)
            await self._until(
                "replicas are back at the minimum", lambda: self._returned(observer),
                self.profile.return_deadline_seconds, fail=False,
            )  # fmt: skip
            phases.append(Phase("calm again", begin, time.monotonic(), calm))
            traffic.set_phase("idle", 0.0)
            generator.cancel()
            with suppress(asyncio.CancelledError):
                await generator
            lag.cancel()
            writes = await self._idle_writes(kube)
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        return await self._report(kube, observer, traffic, phases, start, speed, writes)

    async def _start_service(
        self, kube: Kube, observer: Observer
    ) -> tuple[dict[str, float], asyncio.Task[None]]:
        """The service with its first replicas ready, how fast one of them is, and who watches."""
        service = copy.deepcopy(self.example)
        service["metadata"]["namespace"] = NAMESPACE
        if self.profile.modelled:
            speed = modelled_speed(card_of(self.example), self.profile.shape)
            self._apply(service)
            watcher = asyncio.create_task(observer.run())
            await self._until(
                "the service has its replicas", lambda: self._returned(observer),
                READY_DEADLINE_SECONDS,
            )  # fmt: skip
            return speed, watcher
        probe = self._speed_probe()
        probe_observer = Observer(kube, NAMESPACE, probe["metadata"]["name"])
        self._apply(service, probe)
        watcher = asyncio.create_task(observer.run())
        await self._until(
            "both services have a ready Pod",
            lambda: self._both_ready(observer, probe_observer),
            READY_DEADLINE_SECONDS,
        )
        with self._step("measure this machine's speed"):
            pod = (await probe_observer.sample()).pods[0]
            try:
                speed = await measure_speed(kube, str(pod.ip), self._served_name())
            except TimeoutError as error:
                raise DemoError(str(error)) from error
            self._tool("hack/cluster/kubectl", "delete", "kvis", probe["metadata"]["name"],
                       "-n", NAMESPACE, "--wait=true", "--timeout=60s")  # fmt: skip
        return speed, watcher

    def _remove_old_services(self) -> None:
        self._tool("hack/cluster/kubectl", "delete", "kvis", "--all", "-n", NAMESPACE,
                   "--timeout=90s")  # fmt: skip

    def _speed_probe(self) -> dict[str, Any]:
        """The same service under another name, never scaled: speed is measured beside the demo.

        So the measurement leaves no trace in the demonstrated service's own traffic history.
        """
        probe = copy.deepcopy(self.example)
        probe["metadata"] = {"name": f"{self.name}-speed", "namespace": NAMESPACE}
        probe["spec"]["scaling"]["mode"] = "Advisory"
        return probe

    def _served_name(self) -> str:
        names = self.example["spec"]["model"].get("servedNames")
        return names[0] if names else self.name

    async def _both_ready(self, observer: Observer, probe: Observer) -> bool:
        probe.samples[:] = [await probe.sample()]
        return bool(observer.samples) and observer.samples[-1].ready > 0 and (
            probe.samples[-1].ready > 0
        )  # fmt: skip

    async def _returned(self, observer: Observer) -> bool:
        minimum = self.example["spec"]["scaling"].get("minReplicas", 1)
        if not observer.samples:
            return False
        last = observer.samples[-1]
        return last.desired == minimum and last.ready == minimum and len(last.pods) == minimum

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]], seconds: float,
                     fail: bool = True) -> bool:  # fmt: skip
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if await holds():
                return True
            await asyncio.sleep(0.5)
        if fail:
            raise DemoError(
                f"waited {seconds:.0f} s until {what}, in vain; look at "
                f"`hack/cluster/kubectl get kvis,pods -n {NAMESPACE}` and at the operator's log"
            )
        return False

    async def _service_address(self, kube: Kube) -> str:
        service = await kube.get(f"/api/v1/namespaces/{NAMESPACE}/services/{self.name}")
        return str(service["spec"]["clusterIP"])

    async def _phase(self, traffic: Traffic, phases: list[Phase], name: str, rate: float,
                     seconds: float) -> None:  # fmt: skip
        begin = time.monotonic()
        traffic.set_phase(name, rate)
        await asyncio.sleep(seconds)
        phases.append(Phase(name, begin, time.monotonic(), rate))

    async def _idle_writes(self, kube: Kube) -> dict[str, Any]:
        """Writes of the operator while nothing happens, from its own counters, Leases apart."""
        before = await self._operator_writes(kube)
        await asyncio.sleep(IDLE_SECONDS)
        after = await self._operator_writes(kube)
        return {"seconds": IDLE_SECONDS, "writes": since(before, after)}

    async def _operator_pod(self, kube: Kube) -> dict[str, Any]:
        listing = await kube.get(
            f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
            "?labelSelector=app.kubernetes.io%2Fcomponent%3Doperator"
        )
        pod: dict[str, Any] = listing["items"][0]
        return pod

    async def _operator_writes(self, kube: Kube) -> dict[str, float]:
        pod = await self._operator_pod(kube)
        return await operator_writes(kube, SYSTEM_NAMESPACE, pod["metadata"]["name"])

    async def _operator_errors(self, kube: Kube) -> list[str]:
        pod = await self._operator_pod(kube)
        text = await kube.text(
            f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{pod['metadata']['name']}/log"
        )
        (self.out / "operator.log").write_text(text)
        errors = [line for line in text.splitlines() if _is_error(line)]
        return report.operator_restarts(pod) + errors

    async def _report(self, kube: Kube, observer: Observer, traffic: Traffic,
                      phases: list[Phase], start: float, speed: dict[str, float],
                      writes: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
        scaling = self.example["spec"]["scaling"]
        stated = self.example["spec"].get("objectives", {})
        objectives = Objectives(
            parse_duration(stated.get("timeToFirstToken", "2s")),
            parse_duration(stated.get("timePerOutputToken", "50ms")),
        )
        errors = await self._operator_errors(kube)
        checks = report.judge(observer, traffic.requests, phases, errors,
                              scaling["maxReplicas"], scaling.get("minReplicas", 1),
                              self.profile.admitted_peak_share)  # fmt: skip
        spike = next(p for p in phases if p.name == "spike")
        if self.profile.most_chunks_per_second is not None:
            checks += check_model(
                observer.samples, traffic.requests, spike, card_of(self.example), self.lag,
                self.profile.most_chunks_per_second,
            )  # fmt: skip
        capacity = report.capacity_blocks(observer.samples)
        answer = report.scale_up(observer.samples, spike)
        before, after, full = report.refusal_rates(traffic.requests, observer.samples, spike)
        status = (observer.samples[-1].service or {}).get("status", {})
        last_state = next((p.state for p in observer.samples[-1].pods if p.state), {})
        counts = {r.value: sum(1 for q in traffic.requests if q.result is r) for r in Result}
        rows = report.timeline(observer.samples, start)
        summary = (
            f"{len(traffic.requests)} requests offered, {counts['ok']} answered, "
            f"{counts['refused']} refused with a reason, {counts['broken']} broken. "
            f"The spike was answered after {answer['to_patch_seconds']} s because of "
            f"{answer['binding_constraint']}; a new Pod was Ready after "
            f"{answer['to_new_pod_ready_seconds']} s."
        )
        if self.profile.modelled:
            summary += (
                f" {max(s.ready for s in observer.samples)} replicas at most. No model ran: steps "
                f"took the modelled time of the card, stretched {speed['time_scale']:g}-fold."
            )
        document: dict[str, Any] = {
            "summary": summary,
            "checks": [check.as_json() for check in checks],
            "steps_seconds": self.steps,
            "speed": speed,
            "executor": status.get("executor"),
            "chunks_per_second_peak": chunks_per_second(traffic.requests),
            "client_lag_p99_seconds": self.lag.p99,
            "phases": report.by_phase(traffic.requests, phases, objectives),
            "scale_up": answer,
            "spike_needed_replicas_of_blocks": report.needed_replicas(
                observer.samples, spike, capacity
            ),
            "refusals_per_second": {"before": before, "after": after,
                                    "all_ready_after_seconds": full},
            "replica_capacity_blocks": capacity,
            "pod_start_seconds": report.start_seconds(observer),
            "budget": {"status": status.get("budget"), "replica": last_state.get("capacity")},
            "idle_writes": writes,
            "operator_errors": errors[:20],
            "observer_errors": observer.errors[:20],
            "peak_memory_bytes": observer.peak_memory_bytes,
            "requests": [r.as_row(start) for r in traffic.requests],
            "timeline": rows,
        }  # fmt: skip
        picture = self.out / "demo.png"
        plot.draw(picture, rows, traffic.requests, phases, start, capacity)
        plot.write_html(self.out / "report.html", picture, document, self.profile.title)
        return document


def _is_error(line: str) -> bool:
    """A line of the operator's log at level error or above (the chart has it log JSON).

    What is not JSON did not come from its logger: a traceback, or a library's last words.
    """
    try:
        level = str(json.loads(line)["level"]).lower()
    except (ValueError, KeyError, TypeError):
        return bool(line.strip())
    return level in {"error", "critical", "fatal"}
