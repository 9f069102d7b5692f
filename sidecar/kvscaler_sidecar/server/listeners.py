"""Three HTTP listeners in one event loop: the API, the pages for machines, and the admin API.

Sockets are bound before anything is loaded, so a taken port is known at once, and port 0 gives a
free one whose number is known. Signals belong to the process, not to any of the servers.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common proxies, so that the proxy closes first."""
BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server that leaves signals alone: the replica drains before it lets servers end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises `OSError` naming the address when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from error
    listener.set_inheritable(False)
    return listener


class Listeners:
    """Servers by name, started together and ended together."""

    def __init__(
        self,
        apps: Mapping[str, tuple[ASGIApp, socket.socket]],
        undated: frozenset[str] = frozenset(),
    ) -> None:
        """`undated` names servers whose application gives every answer its own Date."""
        self._servers: dict[str, tuple[_Server, socket.socket]] = {}
        for name, (app, listener) in apps.items():
            config = uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=name not in undated,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                backlog=BACKLOG,
            )
            self._servers[name] = (_Server(config), listener)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ports(self) -> dict[str, int]:
        """Real port numbers by listener."""
        return {
            name: int(listener.getsockname()[1]) for name, (_, listener) in self._servers.items()
        }

    async def start(self) -> None:
        """Accept connections on all sockets."""
        for name, (server, listener) in self._servers.items():
            self._tasks.append(
                asyncio.create_task(server.serve(sockets=[listener]), name=f"serve-{name}")
            )
        while not all(server.started for server, _ in self._servers.values()):
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise RuntimeError(f"{task.get_name()} ended while starting")
            await asyncio.sleep(0.005)

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let responses end for `grace_seconds`, then close what is left."""
        for server, _ in self._servers.values():
            server.config.timeout_graceful_shutdown = max(1, round(grace_seconds))
            server.should_exit = True
        await asyncio.gather(*self._tasks)
