"""A write never leaves after the Lease is gone, and what is on its way is soon given up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from kvscaler_operator.gateways.kube import KubeGateway, UnavailableError, connect
from kvscaler_operator.resources import LEASES, PODS, Object

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a", "namespace": "ns", "resourceVersion": "1"},
}


class Server:
    """An API server that notes writes, and answers them with what was sent."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.runner: web.AppRunner
        self.port = 0

    async def start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(application)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
        return web.json_response(json.loads(await request.read() or b"{}"))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.runner.cleanup()


def kubeconfig(folder: Path, port: int) -> str:
    config: Object = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return str(path)


class Lease:
    """Held for so many looks, and then lost: as if the process had been stopped in between."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def held(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


@pytest.mark.parametrize("connected", [False, True], ids=["new connection", "kept connection"])
async def test_a_lease_lost_between_the_check_and_the_first_byte_stops_the_write(
    server: Server, tmp_path: Path, connected: bool
) -> None:
    lease = Lease(1)
    api = await connect(kubeconfig(tmp_path, server.port), None)
    gateway = KubeGateway(api, fence=lease.held)
    try:
        if connected:
            await gateway.get(PODS, "ns", "a")
        with pytest.raises(UnavailableError, match="another operator may act now") as caught:
            await gateway.apply(PODS, POD)
        assert caught.value.reason == "NotLeading"
        assert server.writes == []
        # A read and the Lease itself are never held back, and the connection pool is intact.
        await gateway.get(PODS, "ns", "a")
        await gateway.replace(LEASES, POD, limited=False)
        lease.looks = 2
        await gateway.apply(PODS, POD)
        assert [write.partition(" ")[0] for write in server.writes] == ["PUT", "PATCH"]
    finally:
        await gateway.close()


async def test_a_read_beside_a_write_is_not_fenced(server: Server, tmp_path: Path) -> None:
    gateway = KubeGateway(
        await connect(kubeconfig(tmp_path, server.port), None), fence=Lease(0).held
    )
    try:
        write, read = await asyncio.gather(
            gateway.apply(PODS, POD), gateway.get(PODS, "ns", "a"), return_exceptions=True
        )
        assert isinstance(write, UnavailableError)
        assert read == {}
    finally:
        await gateway.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_the_kernel_gives_up_on_what_nobody_acknowledges(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: int, **named: int) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr("kvscaler_operator.gateways.late.socket.socket", Noted)
    gateway = KubeGateway(
        await connect(kubeconfig(tmp_path, server.port), None, unacknowledged_seconds=2.5)
    )
    try:
        await gateway.get(PODS, "ns", "a")
        (used,) = [s for s in made if _peer(s) == server.port]
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
    finally:
        await gateway.close()


def _peer(one: socket.socket) -> int | None:
    try:
        return int(one.getpeername()[1])
    except (OSError, IndexError):  # it listens, or is no network's
        return None
