"""A way to an API server that can be cut: everything on it swallowed, or refused.

What was swallowed is lost, and connections from before the cut do not outlive it: their ends have
given up. (What the kernel does with them in a real partition is for the cluster's tests.)
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

CHUNK_BYTES = 65536


class Proxy:
    """Passes connections on to the API server of a handle."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._passes = asyncio.Event()
        self._passes.set()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._port = 0

    async def __aenter__(self) -> "Proxy":
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    def kubeconfig(self, folder: Path) -> Path:
        """The server's kubeconfig with the proxy's address."""
        config = yaml.safe_load(self._server.kubeconfig.read_text())
        for entry in config["clusters"]:
            entry["cluster"]["server"] = f"https://127.0.0.1:{self._port}"
        path = folder / "through-proxy"
        path.write_text(yaml.safe_dump(config))
        return path

    def swallow(self) -> None:
        """Nothing passes, and nobody is told."""
        self._passes.clear()

    async def refuse(self) -> None:
        """Connections are cut, and new ones refused."""
        assert self._listener is not None
        self._listener.close()
        await self._drop()

    async def heal(self) -> None:
        """New connections pass again."""
        await self._drop()
        self._passes.set()
        if self._listener is not None and not self._listener.is_serving():
            await self._listen()

    async def _drop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        server = urlsplit(self._address())
        there, back = await asyncio.open_connection(server.hostname, server.port)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _address(self) -> str:
        config = yaml.safe_load(self._server.kubeconfig.read_text())
        return str(config["clusters"][0]["cluster"]["server"])

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(CHUNK_BYTES):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
            await self._passes.wait()
        sink.close()
