"""Prometheus is read as a whole when anything depends on it, and now and then; else only asked."""

import time
from typing import Any

from kvscaler.traffic import Present
from kvscaler_operator.cache import ObjectCache
from kvscaler_operator.metrics import MachineryMetrics
from kvscaler_operator.observation import WHOLE_EVERY_PASSES, Observers, Ports
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    REPLICA_SETS,
    WATCHED,
    Object,
)
from kvscaler_operator.signals import SignalPath, SignalStore
from prometheus_client import CollectorRegistry

from tests.controller.sidecars import make_state
from tests.controller.world import service_object

LABEL = "kvscaler.io/service-uid"


class Server:
    """Notes how it was read."""

    def __init__(self) -> None:
        self.reads: list[bool] = []

    async def read_all(self, *, whole: bool = True) -> list[Any]:
        self.reads.append(whole)
        return []


def child(name: str, owner: str, **fields: Any) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "resourceVersion": "5",
            "labels": {LABEL: "service"},
            "ownerReferences": [{"uid": owner, "controller": True}],
        },
        **fields,
    }


class Fleet:
    """One service with one ready Pod, observed by `paths`."""

    def __init__(self, *paths: SignalPath) -> None:
        caches = {r: ObjectCache(r, None if r is INFERENCE_SERVICES else LABEL) for r in WATCHED}
        service = service_object("ns")
        service["metadata"] |= {"uid": "service", "resourceVersion": "5"}
        caches[INFERENCE_SERVICES].observe(service)
        caches[DEPLOYMENTS].observe(child("chat", "service", spec={"replicas": 1}))
        caches[REPLICA_SETS].observe(child("set", "uid-chat"))
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": "127.0.0.9", "conditions": [ready]}
        caches[PODS].observe(child("pod", "uid-set", status=status))
        self.signals = SignalStore(paths)
        self.server = Server()
        self.now = time.time()
        self.observers = Observers(
            caches,
            self.signals,
            None,  # type: ignore[arg-type]
            {"default": self.server},  # type: ignore[dict-item]
            Ports(9090, 9443),
            MachineryMetrics(CollectorRegistry()),
            lambda _: None,
            clock=lambda: self.now,
        )

    def answer(self) -> None:
        state = make_state("service", "uid-pod", "pod", observed_at=self.now)
        signal = Present(state, "direct", self.now)
        self.signals.observe("service", "uid-pod", SignalPath.DIRECT, signal)

    async def passes(self, count: int, *, answers: bool) -> list[bool]:
        self.server.reads.clear()
        for _ in range(count):
            self.now += 5.0
            if answers:
                self.answer()
            await self.observers.prometheus_pass()
        return self.server.reads


BOTH = (SignalPath.DIRECT, SignalPath.PROMETHEUS)


async def test_while_all_answer_directly_it_is_read_now_and_then() -> None:
    reads = await Fleet(*BOTH).passes(2 * WHOLE_EVERY_PASSES + 1, answers=True)
    spared = [False] * (WHOLE_EVERY_PASSES - 1)
    assert reads == [True, *spared, True, *spared, True]


async def test_a_replica_that_fell_silent_is_read_from_it_in_every_pass() -> None:
    fleet = Fleet(*BOTH)
    await fleet.passes(2, answers=True)
    fleet.now += fleet.signals.max_age_seconds
    assert await fleet.passes(4, answers=False) == [True] * 4


async def test_without_the_direct_path_it_is_always_read() -> None:
    assert await Fleet(SignalPath.PROMETHEUS).passes(9, answers=False) == [True] * 9
