"""The two observers that fill the SignalStore: one asks replicas, one reads Prometheus.

Each runs on its own beat and marks a service dirty only when something about its load changed, so
that a quiet fleet is not reconciled every second. A hanging replica delays no other service: each
service is done when its own replicas have answered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_api.signals import DEFAULT_PROMETHEUS

from kvscaler_operator.cache import Key, ObjectCache
from kvscaler_operator.gateways.prometheus import (
    PrometheusError,
    PrometheusGateway,
    PrometheusNotAsked,
    Series,
)
from kvscaler_operator.gateways.sidecar import Endpoint, SidecarError, SidecarGateway
from kvscaler_operator.metrics import MachineryMetrics
from kvscaler_operator.observe import Replica, observe_fleet
from kvscaler_operator.resources import (
    INFERENCE_SERVICES,
    Object,
    Resource,
    name_of,
    namespace_of,
    uid_of,
)
from kvscaler_operator.scraped import by_pod, replica_state
from kvscaler_operator.signals import REASON_OF_FAULT, SignalPath, SignalStore

logger = logging.getLogger(__name__)

Dirty = Callable[[Key], None]

WHOLE_EVERY_PASSES = 6
"""While every ready replica answers directly, Prometheus only has to be there: it is read as a whole
(a hundred series of each Pod) in every sixth pass, and asked for one series of each in the others."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of every sidecar."""

    state: int
    admin: int


def endpoint_of(ports: Ports, service_uid: str, replica: Replica) -> Endpoint | None:
    """Where a replica's sidecar listens; `None` while the Pod has no address."""
    if not replica.ip:
        return None
    return Endpoint(service_uid, replica.uid, replica.name, replica.ip, ports.state, ports.admin)


class Observers:
    """Fills `signals` from both paths."""

    def __init__(
        self,
        caches: Mapping[Resource, ObjectCache],
        signals: SignalStore,
        sidecars: SidecarGateway,
        servers: Mapping[str, PrometheusGateway],
        ports: Ports,
        metrics: MachineryMetrics,
        dirty: Dirty,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._caches = caches
        self._signals = signals
        self._sidecars = sidecars
        self._servers = servers
        self._ports = ports
        self._metrics = metrics
        self._dirty = dirty
        self._clock = clock
        self._spared: dict[str, int] = {}
        """By server, passes since it was read as a whole."""

    async def run_direct(self, period_seconds: float) -> None:
        """Ask all replicas, beat after beat, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await self.direct_pass()
            await asyncio.sleep(max(0.0, period_seconds - (loop.time() - begun)))

    async def direct_pass(self) -> None:
        """Ask all replicas once."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.gather(*(self._ask_service(obj) for obj in self._services()))
        self._signals.passed(SignalPath.DIRECT, self._clock())
        self._metrics.signal_pass(SignalPath.DIRECT, loop.time() - begun, failed=False)

    async def run_prometheus(self, period_seconds: float) -> None:
        """Read all servers, beat after beat, until cancelled."""
        while True:
            await self.prometheus_pass()
            await asyncio.sleep(period_seconds)

    async def prometheus_pass(self) -> None:
        """Read every server once, for all services that name it."""
        await asyncio.gather(*(self._read(name, server) for name, server in self._servers.items()))

    def _services(self) -> Iterator[Object]:
        return iter(self._caches[INFERENCE_SERVICES].all())

    def _replicas(self, obj: Object) -> list[Replica]:
        fleet = observe_fleet(self._caches, uid_of(obj), lambda _: 0)
        return [r for r in fleet.replicas if r.phase is not ReplicaPhase.TERMINATING and r.ip]

    async def _ask_service(self, obj: Object) -> None:
        replicas = self._replicas(obj)
        news = await asyncio.gather(*(self._ask(uid_of(obj), r) for r in replicas))
        if any(news):
            self._dirty((namespace_of(obj), name_of(obj)))

    async def _ask(self, service_uid: str, replica: Replica) -> bool:
        endpoint = endpoint_of(self._ports, service_uid, replica)
        if endpoint is None:
            return False
        signal: Signal[ReplicaState]
        try:
            state = await self._sidecars.state(endpoint)
            signal = Present(state, SignalPath.DIRECT, self._clock())
            self._metrics.answer(SignalPath.DIRECT, "ok")
        except SidecarError as error:
            reason = REASON_OF_FAULT.get(error.fault, AbsenceReason.MISSING)
            signal = Absent(reason, SignalPath.DIRECT, str(error))
            self._metrics.answer(SignalPath.DIRECT, error.fault)
        return self._signals.observe(service_uid, replica.uid, SignalPath.DIRECT, signal)

    async def _read(self, name: str, server: PrometheusGateway) -> None:
        path = f"{SignalPath.PROMETHEUS}/{name}"
        before = self._signals.health.get(path)
        was_down = before is not None and bool(before.error)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        whole = was_down or self._is_needed(name)
        try:
            found = await asyncio.to_thread(by_pod, await server.read_all(whole=whole))
        except PrometheusNotAsked:
            # What it failed with before is still the cause.
            self._metrics.signal_pass(path, loop.time() - begun, failed=True)
            return
        except PrometheusError as error:
            if not was_down:
                logger.warning("%s; the direct path carries on where it is enabled", error)
            self._signals.passed(path, self._clock(), str(error))
            self._metrics.signal_pass(path, loop.time() - begun, failed=True)
            if not was_down:
                self._mark_users(name)
            return
        if was_down:
            logger.info("Prometheus %s answers again", name)
            self._mark_users(name)
        self._signals.passed(path, self._clock())
        self._spared[name] = 0 if whole else self._spared.get(name, 0) + 1
        for obj in self._users(name) if whole else ():
            self._take(obj, found)
            await asyncio.sleep(0)  # a service is a moment's work, and there may be hundreds
        self._metrics.signal_pass(path, loop.time() - begun, failed=False)

    def _is_needed(self, name: str) -> bool:
        """Whether anything depends on what a server has, or it was not looked at for long."""
        spared = self._spared.get(name)
        if SignalPath.DIRECT not in self._signals.paths or spared is None:
            return True
        if spared + 1 >= WHOLE_EVERY_PASSES:
            return True
        now = self._clock()
        return any(
            not self._signals.answers_directly(uid_of(obj), replica.uid, now)
            for obj in self._users(name)
            for replica in self._replicas(obj)
            if replica.phase is ReplicaPhase.READY
        )

    def _take(self, obj: Object, found: Mapping[tuple[str, str], list[Series]]) -> None:
        news = False
        for replica in self._replicas(obj):
            series = found.get((namespace_of(obj), replica.name), [])
            signal = replica_state(
                series,
                service_uid=uid_of(obj),
                service_name=name_of(obj),
                pod_uid=replica.uid,
                pod_name=replica.name,
            )
            outcome = "ok" if isinstance(signal, Present) else signal.reason.value
            self._metrics.answer(SignalPath.PROMETHEUS, outcome)
            news |= self._signals.observe(
                uid_of(obj), replica.uid, SignalPath.PROMETHEUS, signal, self._clock()
            )
        if news:
            self._dirty((namespace_of(obj), name_of(obj)))

    def _users(self, server: str) -> list[Object]:
        return [obj for obj in self._services() if _server_of(obj) == server]

    def _mark_users(self, server: str) -> None:
        for obj in self._users(server):
            self._dirty((namespace_of(obj), name_of(obj)))


def _server_of(obj: Object) -> str:
    signals = (obj.get("spec") or {}).get("signals") or {}
    return str(signals.get("prometheus") or DEFAULT_PROMETHEUS)
