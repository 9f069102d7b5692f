"""Two operator processes on one API server: its audit log has one writer at any time."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvscaler_operator.main import LOST
from kvscaler_operator.resources import DEPLOYMENTS, LEASES, Object

from tests.chaos.rows import Faults, Row
from tests.controller.controlled import ControlledWorld, audit, by_operator, controlled_service, of
from tests.controller.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.apiserver, pytest.mark.timeout(300)]

LEASE_SECONDS = 9.0
"""Long enough for a busy machine: who is late by a third of it stops by itself."""
ROOMS = ("core", "crds", "operator")
TREE = Path(__file__).parents[2]


@dataclass
class Process:
    """One operator, by the name that its writes carry in the audit log."""

    name: str
    kubeconfig: Path
    popen: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    async def ended(self, seconds: float = 30) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.popen.wait), seconds)


class Operators:
    """Processes of one release, each with its own way to the API server."""

    def __init__(self, world: ControlledWorld, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.all: list[Process] = []
        self.mark = len(audit(world.server))

    def start(self, name: str, kubeconfig: Path | None = None) -> Process:
        where = kubeconfig or Path(self.world.settings.kubeconfig)
        self.all.append(Process(name, where, self._launch(name, where)))
        return self.all[-1]

    def _launch(self, name: str, kubeconfig: Path) -> subprocess.Popen[bytes]:
        settings = self.world.settings
        paths = os.pathsep.join(str(TREE / room) for room in ROOMS)
        arguments = [
            f"--namespaces={self.world.namespace}",
            f"--release-namespace={self.world.namespace}",
            f"--pod-name={name}",
            f"--kubeconfig={kubeconfig}",
            f"--context={settings.context}",
            f"--lease-duration-seconds={LEASE_SECONDS}",
            "--signal-paths=direct",
            f"--key-file={settings.key_file}",
            f"--state-port={settings.state_port}",
            f"--admin-port={settings.admin_port}",
            "--metrics-port=0",
            "--probe-port=0",
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "kvscaler_operator", *arguments],
                env={**os.environ, "PYTHONPATH": paths},
                stdout=log,
                stderr=log,
            )

    def _keep(self, name: str) -> None:
        """As a kubelet does: one that could not renew its Lease on a busy machine is started again."""
        for process in self.all:
            if process.name == name and process.popen.poll() == LOST:
                process.popen = self._launch(name, process.kubeconfig)

    def writes(self) -> list[tuple[str, Object]]:
        """Who wrote what, in the order of the log; renewals and attempts at the Lease left out."""
        found = []
        for entry in audit(self.world.server)[self.mark :]:
            reference = entry.get("objectRef") or {}
            if reference.get("namespace") != self.world.namespace or not by_operator(entry):
                continue
            if reference.get("resource") != LEASES.plural:
                found.append((entry["userAgent"].partition("(")[2].rstrip(")"), entry))
        return found

    async def until_writes_of(self, name: str, more_than: int = 0, seconds: float = 60) -> int:
        """Wait until an operator has written more than so often."""

        async def check() -> int | None:
            self._keep(name)
            count = sum(writer == name for writer, _ in self.writes())
            return count if count > more_than else None

        try:
            return int(await self.world.eventually(check, seconds, f"{name} writes"))
        except AssertionError as error:
            words = (self.folder / f"{name}.log").read_text()[-2000:]
            raise AssertionError(f"{error}\n{words}") from None

    def end(self) -> None:
        for process in self.all:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


@pytest.fixture
async def operators(controlled: ControlledWorld, tmp_path: Path) -> AsyncIterator[Operators]:
    """Nobody runs yet. Somebody asks for another number of replicas all the time."""
    made = Operators(controlled, tmp_path)
    asked = {"mode": "External", "maxReplicas": 6, "scaleDown": {"drainTimeout": "1s"}}
    await controlled.create(controlled_service(controlled.namespace, scaling=asked))
    restless = asyncio.create_task(_keep_asking(controlled))
    try:
        yield made
    finally:
        restless.cancel()
        await asyncio.gather(restless, return_exceptions=True)
        made.end()


async def _keep_asking(world: ControlledWorld) -> None:
    """Edits of a child that the operator takes back, and another number of replicas: it writes."""
    count = 0
    while True:
        count += 1
        await world.scale(2 + count % 2)
        with contextlib.suppress(Exception):
            path = DEPLOYMENTS.path(world.namespace, "chat", "scale")
            await world.kube._write(
                "PATCH", DEPLOYMENTS, path, {"spec": {"replicas": 4}}, {"fieldManager": "kubectl"},
                "application/merge-patch+json",
            )  # fmt: skip
        await asyncio.sleep(0.1)


def one_writer(row: Row, operators: "Operators", *order: str) -> None:
    """The end of a row: the audit log has these writers, each in one turn of its own."""
    writes = operators.writes()
    assert turns(writes) == list(order)
    words = f"{len(writes)} writes in {len(order)} turns: {', then '.join(order)}"
    row.recovered("replicas serve on; the number asked for is followed again", words)


def turns(writes: Sequence[tuple[str, Object]]) -> list[str]:
    """Writers in the order in which they took over; one that comes back stands there twice."""
    found: list[str] = []
    for writer, _ in sorted(writes, key=lambda each: each[1]["requestReceivedTimestamp"]):
        if not found or found[-1] != writer:
            found.append(writer)
    return found


async def test_a_rolling_upgrade_hands_over_and_the_old_one_never_writes_again(
    operators: Operators, faults: Faults
) -> None:
    old = operators.start("old")
    await operators.until_writes_of("old", 3)
    new = operators.start("new")
    await asyncio.sleep(1.5 * LEASE_SECONDS)
    assert turns(operators.writes()) == ["old"]
    with faults.row("two operators: rolling upgrade") as row:
        old.send(signal.SIGTERM)
        assert await old.ended() == 0
        await operators.until_writes_of("new", 3)
        one_writer(row, operators, "old", "new")
    assert new.popen.poll() is None


async def test_one_that_was_stopped_past_its_lease_wakes_up_and_writes_nothing(
    operators: Operators, faults: Faults
) -> None:
    order = ["one"]
    current = operators.start("one")
    for successor in ("two", "three"):
        await operators.until_writes_of(current.name, 3)
        with faults.row(f"two operators: {current.name} stopped past its lease, and woken") as row:
            current.send(signal.SIGSTOP)
            waiting = operators.start(successor)
            order.append(successor)
            await operators.until_writes_of(successor, 3)
            current.send(signal.SIGCONT)
            assert await current.ended() == LOST
            before = await operators.until_writes_of(successor)
            await operators.until_writes_of(successor, before + 3)
            one_writer(row, operators, *order)
        current = waiting


async def test_one_that_was_killed_is_followed_after_its_lease(
    operators: Operators, faults: Faults
) -> None:
    first = operators.start("first")
    await operators.until_writes_of("first", 3)
    second = operators.start("second")
    with faults.row("two operators: the one that writes killed with -9") as row:
        first.send(signal.SIGKILL)
        await operators.until_writes_of("second", 3)
        one_writer(row, operators, "first", "second")
    assert second.popen.poll() is None


@pytest.mark.parametrize("kind", ["black hole", "refusing"])
async def test_one_that_is_cut_off_is_followed_and_does_not_come_back(
    operators: Operators, faults: Faults, kind: str
) -> None:
    async with Proxy(operators.world.server) as proxy:
        cut = operators.start("cut", proxy.kubeconfig(operators.folder))
        await operators.until_writes_of("cut", 3)
        operators.start("other")
        with faults.row(f"two operators: one cut off from the API server ({kind})") as row:
            await _cut_off(operators, proxy, cut, kind)
            one_writer(row, operators, "cut", "other")


async def _cut_off(operators: Operators, proxy: Proxy, cut: Process, kind: str) -> None:
    if kind == "refusing":
        await proxy.refuse()
    else:
        proxy.swallow()
    await operators.until_writes_of("other", 3)
    assert await cut.ended() == LOST
    await proxy.heal()
    before = await operators.until_writes_of("other")
    await operators.until_writes_of("other", before + 3)


async def test_a_drain_is_taken_up_by_the_next_operator(
    controlled: ControlledWorld, tmp_path: Path, faults: Faults
) -> None:
    made = Operators(controlled, tmp_path)
    try:
        with faults.row("operator killed with -9 in a drain, another takes it up") as row:
            await _taken_up(controlled, made)
            row.recovered("the victim's request ends", "replicas lowered by the second, once")
    finally:
        made.end()


async def _taken_up(world: ControlledWorld, operators: Operators) -> None:
    asked = {"mode": "External", "maxReplicas": 6, "scaleDown": {"drainTimeout": "2m"}}
    await world.create(controlled_service(world.namespace, scaling=asked))
    first = operators.start("first")
    await world.deployment()
    await world.scale(3)
    names = await world.until_ready(3)
    for name in names:
        world.begin_stream(name)
    await world.scale(2)
    (victim,) = await world.until_draining(1)
    first.send(signal.SIGKILL)
    await first.ended()
    operators.start("second")
    world.end_stream(victim)

    async def gone() -> Any:
        return [pod.name for pod in world.kubelet.gone] == [victim]

    await world.eventually(gone, 40, "the victim is gone")
    assert set(await world.until_ready(2)) == set(names) - {victim}
    scaled = [w for w, e in operators.writes() if of(e) == f"{DEPLOYMENTS.plural}/scale"]
    assert scaled[-1] == "second"
