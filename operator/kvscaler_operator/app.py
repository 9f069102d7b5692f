"""The operator put together: one Lease, one Kopf, one queue, two observers, a few servers.

Everything runs as tasks of one group: when any of them ends, all end, and the process with them.
A zombie that looks healthy is worse than a restart.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kubernetes.aio import client as kubernetes_client
from kvscaler import __version__
from kvscaler_api.metadata import SERVICE_UID_LABEL
from prometheus_client import CollectorRegistry

from kvscaler_operator import handlers
from kvscaler_operator.apply import ChildWriter
from kvscaler_operator.cache import Key, ObjectCache
from kvscaler_operator.drain import Drainer
from kvscaler_operator.events import EventRecorder
from kvscaler_operator.gateways.kube import FIELD_MANAGER, KubeGateway, connect
from kvscaler_operator.gateways.limiter import TokenBucket
from kvscaler_operator.gateways.prometheus import PrometheusGateway
from kvscaler_operator.gateways.sidecar import SidecarGateway
from kvscaler_operator.keys import KeyFile, KeyFileError, SigningKey
from kvscaler_operator.lease import LeaseElector
from kvscaler_operator.limits import LimitsWriter
from kvscaler_operator.metrics import MachineryMetrics, ServiceMetrics
from kvscaler_operator.observation import Observers, Ports, endpoint_of
from kvscaler_operator.probes import Health, HttpServers, older_than
from kvscaler_operator.queue import WorkQueue
from kvscaler_operator.reconcile import Options, Reconciler
from kvscaler_operator.relist import Relist
from kvscaler_operator.resources import CHILDREN, INFERENCE_SERVICES, PODS, WATCHED, uid_of
from kvscaler_operator.scale import ScaleWriter
from kvscaler_operator.schema_check import schema_fault
from kvscaler_operator.settings import Settings, prometheus_servers
from kvscaler_operator.signals import SignalPath, SignalStore
from kvscaler_operator.watches import run_watches
from kvscaler_operator.worker import Workers
from kvscaler_operator.writers import Writers

logger = logging.getLogger(__name__)

LOOP_LAG_SECONDS = 20.0
KEY_AGE_SECONDS = 180.0
SELECTORS = {r: SERVICE_UID_LABEL for r in WATCHED if r is not INFERENCE_SERVICES}


class Operator:
    """One operator process. `run` serves until it is cancelled or something breaks.

    `clock` gives Unix seconds, which may be set back at any time; the Lease and all waiting go by
    the event loop's clock, which can't. `settled` is called when the caches are filled, and in each
    period after that: whatever is in memory then will stay for long.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self._settled = settled
        self._clock = clock
        self.registry = CollectorRegistry()
        self.machinery = MachineryMetrics(self.registry)
        self.services = ServiceMetrics(self.registry)
        self.health = Health(readiness={"first-pass": lambda: "waiting for the lease"})
        self.http = HttpServers(self.health, self.registry)
        self.caches = {
            r: ObjectCache(r, None if r is INFERENCE_SERVICES else SERVICE_UID_LABEL)
            for r in WATCHED
        }
        self.signals = SignalStore(settings.signal_paths, settings.signal_max_age_seconds)
        self.queue: WorkQueue[Key] = WorkQueue(metrics=self.machinery)
        self.sink = handlers.EventSink(self.caches, self.queue.add)
        self.kube: KubeGateway | None = None
        self._elector: LeaseElector | None = None
        self._keys = KeyFile(settings.key_file) if settings.key_file is not None else None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Serve under the Lease until `stop` is set; raises what ended it otherwise."""
        settings = self.settings
        lease_seconds = settings.lease_duration_seconds
        deadline_seconds = lease_seconds * 2 / 3
        api = await connect(
            settings.kubeconfig or None,
            settings.context or None,
            # A write sent at the deadline has arrived, or never will, before another may begin.
            unacknowledged_seconds=lease_seconds - deadline_seconds,
            agent=f"{FIELD_MANAGER}/{__version__} ({settings.pod_name})",
        )
        self.kube = KubeGateway(
            api,
            writes=TokenBucket(settings.writes_per_second, int(2 * settings.writes_per_second)),
            observer=self.machinery,
            fence=self._leads,
        )
        elector = LeaseElector(
            self.kube,
            settings.release_namespace,
            settings.lease_name,
            settings.pod_name,
            duration_seconds=lease_seconds,
            deadline_seconds=deadline_seconds,
            retry_seconds=lease_seconds / 7.5,
        )
        self._elector = elector
        await self.http.start(settings.probe_port, settings.metrics_port)
        try:
            await elector.run(self._serve(self.kube, api, elector, stop or asyncio.Event()))
        finally:
            await self.http.stop()
            await self.kube.close()

    async def _serve(
        self,
        kube: KubeGateway,
        api: kubernetes_client.ApiClient,
        elector: LeaseElector,
        stop: asyncio.Event,
    ) -> None:
        settings = self.settings
        servers = {
            name: PrometheusGateway(server, settings.namespaces)
            for name, server in prometheus_servers(settings.prometheus_config).items()
        }
        sidecars = SidecarGateway(self._signing_key)
        events = EventRecorder(kube, settings.pod_name)
        ports = Ports(settings.state_port, settings.admin_port)
        writers = self._writers(kube, sidecars, events, ports)
        options = Options(
            settings.sidecar_image,
            settings.image_pull_policy,
            frozenset(servers),
            await schema_fault(kube),
        )
        if options.schema_fault is not None:
            logger.error("%s", options.schema_fault.message)
        reconciler = Reconciler(
            self.caches,
            self.signals,
            writers,
            self.services,
            options,
            self._public_keys,
            clock=self._clock,
        )
        workers = Workers(self.queue, reconciler.reconcile, self.machinery)
        observers = Observers(
            self.caches,
            self.signals,
            sidecars,
            servers,
            ports,
            self.machinery,
            self.queue.add,
            clock=self._clock,
        )
        relist = Relist(
            kube,
            self.caches,
            SELECTORS,
            settings.namespaces,
            self.sink.touch,
            took=self.machinery.relisted,
        )
        self._add_checks(elector, workers, relist)
        tasks: dict[str, Coroutine[Any, Any, None]] = {
            "events": events.run(),
            "heartbeat": self.health.run_heartbeat(self.machinery.lagged),
            "forget": self._forget_pods(writers, sidecars),
            "watches": run_watches(settings, api, self.sink.take),
            "work": self._work(workers, relist, observers),
            "relist": relist.run(settings.relist_seconds),
        }
        if SignalPath.DIRECT in settings.signal_paths:
            tasks["direct"] = observers.run_direct(settings.tick_seconds)
        if SignalPath.PROMETHEUS in settings.signal_paths:
            tasks["prometheus"] = observers.run_prometheus(settings.prometheus_seconds)
        try:
            await _run_until(tasks, stop)
        finally:
            self.queue.close()
            await events.flush(2.0)
            await sidecars.close()
            for server in servers.values():
                server.close()

    def _writers(
        self, kube: KubeGateway, sidecars: SidecarGateway, events: EventRecorder, ports: Ports
    ) -> Writers:
        def endpoint(service_uid: str, replica: Any) -> Any:
            return endpoint_of(ports, service_uid, replica)

        scales = ScaleWriter(kube, self.caches)
        return Writers(
            kube,
            ChildWriter(kube, self.caches, events, scales),
            scales,
            Drainer(kube, sidecars, endpoint, self.caches[PODS].observe),
            LimitsWriter(sidecars, endpoint),
            events,
        )

    async def _work(self, workers: Workers, relist: Relist, observers: Observers) -> None:
        """Fill the caches by a list of our own and look at replicas once before the first
        reconcile, so that it sees a whole fleet and not its beginning."""
        relist.start_clock()
        await relist.fill()
        if SignalPath.DIRECT in self.settings.signal_paths:
            await observers.direct_pass()
        self._settled()
        expected = {
            (o["metadata"]["namespace"], o["metadata"]["name"])
            for o in self.caches[INFERENCE_SERVICES].all()
        }
        logger.info("Caches are filled: %d services", len(expected))
        self.health.readiness["first-pass"] = lambda: _unseen(expected - workers.done)
        await workers.run(self.settings.workers)

    async def _forget_pods(self, writers: Writers, sidecars: SidecarGateway) -> None:
        """Memory of Pods and children lives as long as they do."""
        while True:
            await asyncio.sleep(self.settings.relist_seconds)
            known = self.caches[PODS].all()
            pods = {uid_of(pod) for pod in known}
            sidecars.keep({(pod.get("status") or {}).get("podIP") or "" for pod in known})
            writers.drainer.keep(pods)
            writers.limits.keep(pods)
            self.signals.keep_services({uid_of(o) for o in self.caches[INFERENCE_SERVICES].all()})
            writers.children.keep({uid_of(o) for r in CHILDREN for o in self.caches[r].all()})
            self._settled()

    def _add_checks(self, elector: LeaseElector, workers: Workers, relist: Relist) -> None:
        settings, checks = self.settings, self.health.liveness
        checks["lease"] = lambda: None if elector.held else "the lease is not held"
        checks["loop"] = older_than(LOOP_LAG_SECONDS, lambda: self.health.lag_seconds, "heartbeat")
        watch_limit = 3 * settings.relist_seconds + 60.0
        checks["watch"] = older_than(watch_limit, relist.watch_age_seconds, "view of the cluster")
        checks["queue"] = older_than(KEY_AGE_SECONDS, self.queue.oldest_age_seconds, "oldest key")
        checks["worker"] = older_than(
            KEY_AGE_SECONDS, workers.longest_running_seconds, "longest reconcile"
        )

    def _leads(self) -> bool:
        return self._elector is not None and self._elector.held

    def _signing_key(self) -> SigningKey:
        if not self._leads():
            # A process that was stopped and goes on must not command its successor's replicas.
            raise KeyFileError("the lease is not held: another operator may act now")
        if self._keys is None:
            raise KeyFileError("no signing key is configured (--key-file): replicas can't be told")
        return self._keys.current()

    def _public_keys(self) -> Mapping[str, str]:
        return self._keys.public_keys() if self._keys is not None else {}


def _unseen(keys: set[Key]) -> str | None:
    return f"{len(keys)} services were not looked at yet" if keys else None


async def _run_until(tasks: Mapping[str, Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
    """Run all until `stop` is set or one ends; raises what ended it."""
    running = {asyncio.create_task(coro, name=name) for name, coro in tasks.items()}
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*running, stopping):
            task.cancel()
        await asyncio.gather(*running, stopping, return_exceptions=True)
    if stopping in done:
        return
    for task in done:
        error = task.exception()
        raise RuntimeError(f"the part {task.get_name()!r} of the operator ended") from error
