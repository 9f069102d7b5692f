"""Every fault of `signal_faults` on a real API server: replicas stay, status says why, and all is
well again by itself. Three operators see one Prometheus at once, each by other paths."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kvscaler_operator import reconcile
from kvscaler_operator.resources import PODS, name_of, uid_of
from kvscaler_operator.signals import SignalPath

from tests.chaos.rows import Faults
from tests.controller.fake_prometheus import FakePrometheus
from tests.controller.sidecars import BLOCKS, OWN_LIMITS, FakeSidecar, make_state
from tests.controller.signal_faults import (
    DAY_SECONDS,
    PROMETHEUS_FAULTS,
    SIDECAR_FAULTS,
    PrometheusFault,
    Scene,
    SidecarFault,
    busy,
    own_limits,
)
from tests.controller.world import World, make_namespace, service_object

pytestmark = [
    pytest.mark.apiserver,
    pytest.mark.fault,
    pytest.mark.asyncio(loop_scope="module"),
]

FEW, MANY = 3, 10
MAX_AGE_SECONDS = 5.0
WATCHED_SECONDS = 2.5
"""Longer than the stabilization window: a load that is read as zero would have shrunk the fleet."""
RECOVERY_SECONDS = 90.0
BOTH = frozenset({SignalPath.DIRECT, SignalPath.PROMETHEUS})


def scaling(**changes: Any) -> dict[str, Any]:
    return {
        "mode": "Managed",
        "maxReplicas": 12,
        "scaleDown": {"stabilizationWindow": "2s", "drainTimeout": "1m"},
        "onMissingSignals": {"policy": "Hold", "for": "10m"},
        **changes,
    }


def configuration(folder: Path, prometheus: FakePrometheus) -> Path:
    """A new folder with the operator's file of Prometheus servers."""
    folder.mkdir()
    config = folder / "prometheus.yaml"
    config.write_text(f"servers: {{default: {{url: '{prometheus.url}'}}}}\n")
    return config


@asynccontextmanager
async def busy_world(
    server: Any,
    folder: Path,
    prometheus: FakePrometheus,
    paths: frozenset[SignalPath],
    replicas: int,
    **fields: Any,
) -> AsyncIterator[World]:
    """An operator with these paths, and a service that needs just the replicas that it has."""
    config = configuration(folder, prometheus)
    world = World(
        server.kubeconfig,
        server.context,
        make_namespace(server),
        folder,
        signal_paths=paths,
        prometheus_config=config,
        tick_seconds=0.5,
        prometheus_seconds=1.0,
        lease_duration_seconds=120.0,
        signal_max_age_seconds=MAX_AGE_SECONDS,
    )
    world.prepare = busy
    async with world:
        await world.start_operator()
        spec = {"replicas": replicas, "scaling": scaling(), **fields}
        obj = service_object(world.namespace, **spec)
        # While Pods are being made, those that are there hold less than all will.
        quick = obj["spec"]["scaling"]["scaleDown"]
        obj["spec"]["scaling"]["scaleDown"] = {**quick, "stabilizationWindow": "10m"}
        await world.create(obj)
        await world.sync_pods()

        async def complete() -> bool:
            message: str = (await world.condition("Ready"))["message"]
            return message.startswith(f"{replicas} of {replicas} ")

        await world.eventually(complete, RECOVERY_SECONDS)
        await world.patch({"spec": {"scaling": {"scaleDown": quick}}})
        yield world


def scraped(worlds: Sequence[World]) -> Callable[[], Any]:
    """What a Prometheus finds that discovers the Pods of these."""
    return lambda: [
        (world.namespace, name, sidecar.report())
        for world in worlds
        for name, sidecar in list(world.sidecars.items())
        if sidecar.state is not None
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(server: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("signals")
    prometheus_only = frozenset({SignalPath.PROMETHEUS})
    direct_only = frozenset({SignalPath.DIRECT})
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(reconcile, "LOOK_AGAIN_SECONDS", 1.0)
        prometheus = await stack.enter_async_context(FakePrometheus())
        worlds: list[World] = []
        prometheus.targets = scraped(worlds)
        for name, paths, replicas in (
            ("alone", prometheus_only, FEW),
            ("beside", BOTH, FEW),
            ("direct", direct_only, MANY),
        ):
            worlds.append(
                await stack.enter_async_context(
                    busy_world(server, folder / name, prometheus, paths, replicas)
                )
            )
        yield Scene(prometheus, *worlds)


async def observed(world: World, *, of: str = "") -> None:
    """Wait until a service is observed and decided on, with all its replicas."""
    await world.until_condition("SignalsFresh", "True", of or "Fresh", seconds=RECOVERY_SECONDS)
    await world.until_condition("ScalingActive", "True", "Deciding", seconds=RECOVERY_SECONDS)


@pytest_asyncio.fixture(loop_scope="module")
async def well(scene: Scene) -> AsyncIterator[Scene]:
    """The scene without any fault, before and after the test."""
    await scene.heal()
    await asyncio.gather(*(observed(world) for world in scene.worlds))
    yield scene
    await scene.heal()


async def counts(world: World) -> tuple[int, int, int]:
    """Replicas asked for, replicas of the Deployment, and drains begun."""
    service, deployment = await world.service(), await world.deployment()
    drains = sum(len(s.drain_puts) for s in world.sidecars.values())
    return service["spec"]["replicas"], deployment["spec"]["replicas"], drains


async def unmoved(world: World) -> str:
    """Watch a service for longer than its stabilization window; says what its users saw."""
    replicas = len(world.sidecars)
    deadline = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < deadline:
        assert await counts(world) == (replicas, replicas, 0)
        await asyncio.sleep(0.2)
    return f"nothing: {replicas} of {replicas} replicas serve on"


async def holds(world: World, verdict: tuple[str, str], says: str) -> str:
    """Wait for this verdict of SignalsFresh, and what follows from it; says what status said."""

    async def said() -> bool:
        found = await world.condition("SignalsFresh")
        return (found["status"], found["reason"]) == verdict and says in found["message"]

    try:
        await world.eventually(said, RECOVERY_SECONDS)
    except AssertionError:
        raise AssertionError(
            f"not {verdict} with {says!r}: {(await world.service())['status']['conditions']}"
        ) from None
    if verdict[0] == "False":
        await world.until_condition("ScalingActive", "False", "Holding", seconds=RECOVERY_SECONDS)
        return f"SignalsFresh={'/'.join(verdict)}, ScalingActive=False/Holding"
    await world.until_condition("ScalingActive", "True", "Deciding", seconds=RECOVERY_SECONDS)
    return f"SignalsFresh={'/'.join(verdict)}"


@pytest.mark.parametrize("fault", PROMETHEUS_FAULTS, ids=lambda fault: fault.name)
async def test_prometheus(well: Scene, fault: PrometheusFault, faults: Faults) -> None:
    watched = (well.alone, well.beside)
    with faults.row(f"Prometheus {fault.name}") as row:
        await fault.make(well)
        row.strike()
        alone, beside = await asyncio.gather(
            holds(well.alone, fault.alone, fault.says), holds(well.beside, fault.beside, "")
        )
        users = (await asyncio.gather(*(unmoved(world) for world in watched)))[0]
        # What is said at last is what was said all along.
        assert await holds(well.alone, fault.alone, fault.says) == alone
        await well.heal()
        row.strike()
        await asyncio.gather(*(observed(world) for world in watched))
        await asyncio.gather(*(unmoved(world) for world in watched))
        status = alone if alone == beside else f"as the only path: {alone}; beside: {beside}"
        row.recovered(users, status)


@pytest.mark.parametrize("fault", SIDECAR_FAULTS, ids=lambda fault: fault.name)
async def test_sidecar(well: Scene, fault: SidecarFault, faults: Faults) -> None:
    watched = (well.direct, well.beside)
    puts = {id(s): len(s.limits_puts) for w in watched for s in w.sidecars.values()}
    with faults.row(f"one of {MANY} sidecars {fault.name}") as row:
        await fault.make(well)
        row.strike()
        direct, beside = await asyncio.gather(
            holds(well.direct, fault.direct, fault.says), holds(well.beside, fault.beside, "")
        )
        users = (await asyncio.gather(*(unmoved(world) for world in watched)))[0]
        others = [s for w in watched for s in w.sidecars.values() if s not in well.victims()]
        assert [len(s.limits_puts) for s in others] == [puts[id(s)] for s in others]
        assert all(s.most_bytes_sent < 64 << 20 for w in watched for s in w.sidecars.values())
        await well.heal()
        row.strike()
        await asyncio.gather(*(observed(world) for world in watched))
        await asyncio.gather(*(unmoved(world) for world in watched))
        status = direct if direct == beside else f"{direct}; with Prometheus: {beside}"
        row.recovered(users, status)


async def test_a_forged_pod_is_neither_asked_nor_counted(well: Scene, faults: Faults) -> None:
    world = well.beside
    with faults.row("a Pod with our labels and no owner claims a great load") as row:
        (template,) = [p for p in await world.pods() if name_of(p) == sorted(world.sidecars)[0]]
        forged = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "mallory",
                "namespace": world.namespace,
                "labels": template["metadata"]["labels"],
            },
            "spec": {
                "containers": [{"name": "engine", "image": "docker.io/local/mallory"}],
                "terminationGracePeriodSeconds": 0,
            },
        }
        pod = await world.kube.create(PODS, forged)
        ip = "127.0.1.1"
        sidecar = FakeSidecar(ip, world.settings.state_port, world.settings.admin_port, None)
        owner = template["metadata"]["labels"]["kvscaler.io/service-uid"]
        sidecar.state = make_state(owner, uid_of(pod), "mallory")
        assert sidecar.state.occupancy is not None
        waiting = {"waiting_requests": 1_000, "waiting_blocks": 12_000, "waiting_tokens": 100_000}
        sidecar.set(occupancy=sidecar.state.occupancy.model_copy(update=waiting))
        await sidecar.start()
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        await world.kube.merge(PODS, world.namespace, "mallory", {"status": status}, "status")
        await world.set_pod_ready("mallory", True)
        row.strike()
        users = await unmoved(world)
        assert (sidecar.asked, sidecar.limits_puts, sidecar.drain_puts) == (0, [], [])
        await observed(world)
        assert (await world.service())["status"]["replicas"] == FEW
        await world.remove_pod(pod)
        await sidecar.stop()
        row.recovered(users, "nothing: it is not ours by its owner")


async def until_applied(world: World) -> None:
    await world.until_condition("LimitsApplied", "True", "Applied", seconds=RECOVERY_SECONDS)


async def with_queue(world: World, requests: int) -> None:
    """Other limits for all replicas, by the spec."""
    queue = {"maxRequests": requests, "maxWait": "30s"}
    await world.patch({"spec": {"admission": {"mode": "Enforce", "queue": queue}}})


async def test_limits_of_ten_times_its_capacity_are_clamped(well: Scene, faults: Faults) -> None:
    world = well.beside
    await until_applied(world)
    name = sorted(world.sidecars)[0]
    sidecar = world.sidecars[name]
    with faults.row("a replica is given limits of 10 times what it has") as row:
        sidecar.physical = OWN_LIMITS.model_copy(update={"kv_blocks": BLOCKS // 10})
        await with_queue(world, 100)
        found = await world.until_condition(
            "LimitsApplied", "False", "Clamped", seconds=RECOVERY_SECONDS
        )
        assert f"{name} lowered kv_blocks" in found["message"]
        assert sidecar.limits.applied.kv_blocks == BLOCKS // 10
        told = len(sidecar.limits_puts)
        users = await unmoved(world)
        assert len(sidecar.limits_puts) == told, "what is clamped is not asked for again"
        sidecar.physical = None
        own_limits(sidecar)
        row.strike()
        await until_applied(world)
        row.recovered(users, "LimitsApplied=False/Clamped: the replica and the limit by name")


async def test_a_clamp_is_seen_through_prometheus_too(well: Scene) -> None:
    """Replicas are told directly however they are observed."""
    world = well.alone
    await until_applied(world)
    sidecar = world.sidecars[sorted(world.sidecars)[0]]
    sidecar.physical = OWN_LIMITS.model_copy(update={"kv_blocks": BLOCKS // 10})
    await with_queue(world, 90)
    await world.until_condition("LimitsApplied", "False", "Clamped", seconds=RECOVERY_SECONDS)

    async def forgotten() -> bool:
        # What the replica answered counts for a while; then what it is seen to report.
        message: str = (await world.condition("LimitsApplied"))["message"]
        return "lowered some limits" in message

    await world.eventually(forgotten, RECOVERY_SECONDS)
    assert (await world.condition("LimitsApplied"))["reason"] == "Clamped"
    sidecar.physical = None
    own_limits(sidecar)
    await until_applied(world)


@pytest.mark.parametrize(("seconds", "side"), [(-DAY_SECONDS, "behind"), (DAY_SECONDS, "ahead of")])
async def test_a_replica_whose_clock_refuses_tokens_says_so(
    well: Scene, faults: Faults, seconds: float, side: str
) -> None:
    world = well.beside
    await until_applied(world)
    sidecar = world.sidecars[sorted(world.sidecars)[0]]
    with faults.row(f"a replica's clock is a day {side} ours when limits change") as row:
        sidecar.clock_seconds = seconds
        await with_queue(world, 80 if seconds < 0 else 70)

        async def told() -> bool:
            found = await world.condition("LimitsApplied")
            words = f"its clock is 86400 s {side} ours"
            return found["reason"] == "Pending" and words in found["message"]

        await world.eventually(told, RECOVERY_SECONDS)
        users = await unmoved(world)
        sidecar.clock_seconds = 0.0
        row.strike()
        await until_applied(world)
        row.recovered(users, "LimitsApplied=False/Pending: by how much its clock is off")


async def test_a_hold_is_bounded_on_either_path(
    server: Any, tmp_path: Path, faults: Faults
) -> None:
    """The shortest hold that can be asked for, with all signals gone."""
    hold = {"onMissingSignals": {"policy": "Hold", "for": "10s"}}
    with faults.row("all signals are gone for longer than onMissingSignals.for") as row:
        async with AsyncExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                reconcile, "LOOK_AGAIN_SECONDS", 1.0
            )
            prometheus = await stack.enter_async_context(FakePrometheus())
            worlds: list[World] = []
            prometheus.targets = scraped(worlds)
            for name, paths in (
                ("prometheus", frozenset({SignalPath.PROMETHEUS})),
                ("direct", frozenset({SignalPath.DIRECT})),
            ):
                worlds.append(
                    await stack.enter_async_context(
                        busy_world(
                            server,
                            tmp_path / name,
                            prometheus,
                            paths,
                            FEW,
                            scaling=scaling(**hold),
                        )
                    )
                )
            await asyncio.gather(*(observed(world) for world in worlds))
            await prometheus.refuse()
            for sidecar in worlds[1].sidecars.values():
                sidecar.hang = True
            await asyncio.gather(
                *(
                    world.until_condition("ScalingActive", "False", "Holding", seconds=30)
                    for world in worlds
                )
            )
            for world in worlds:
                found = await world.until_condition(
                    "ScalingActive", "False", "HoldExpired", seconds=40
                )
                assert f"{FEW} replicas stay" in found["message"]
            users = (await asyncio.gather(*(unmoved(world) for world in worlds)))[0]
            await prometheus.listen()
            for sidecar in worlds[1].sidecars.values():
                sidecar.hang = False
            row.strike()
            await asyncio.gather(*(observed(world) for world in worlds))
            await asyncio.gather(*(unmoved(world) for world in worlds))
        row.recovered(users, "ScalingActive=False/Holding, after 10 s False/HoldExpired")


async def test_prometheus_is_absent_from_the_start(
    server: Any, tmp_path: Path, faults: Faults
) -> None:
    """As the only path: not configured, then configured and down, then there."""
    with faults.row("Prometheus is absent, as the only path") as row:
        async with AsyncExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                reconcile, "LOOK_AGAIN_SECONDS", 1.0
            )
            prometheus = await stack.enter_async_context(FakePrometheus())
            await prometheus.refuse()
            paths = frozenset({SignalPath.PROMETHEUS})
            world = await stack.enter_async_context(
                busy_world(server, tmp_path / "absent", prometheus, paths, FEW)
            )
            prometheus.targets = scraped([world])
            unreachable = ("False", "PrometheusUnreachable")
            await holds(world, unreachable, "Connection refused")
            await world.stop_operator()
            await world.start_operator(prometheus_config=None)
            status = await holds(world, unreachable, "has no Prometheus server 'default'")
            users = await unmoved(world)
            await world.stop_operator()
            await world.start_operator()
            await holds(world, unreachable, "Connection refused")
            await prometheus.listen()
            row.strike()
            await observed(world)
            await unmoved(world)
        row.recovered(users, status)
