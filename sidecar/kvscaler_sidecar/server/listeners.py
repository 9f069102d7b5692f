"""Three HTTP listeners in one event loop: the API, the pages for machines, and the admin API.

Sockets are bound before anything is loaded, so a taken port is known at once, and port 0 gives a
free one whose number is known. Signals belong to the process, not to any of the servers.

Each listener bounds its connections, so that whoever uses up one of them leaves the others alone.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from kvscaler.protocol.refusals import RefusalReason
from starlette.types import ASGIApp

from kvscaler_sidecar.server.connections import ConnectionLimits, GuardedProtocol
from kvscaler_sidecar.server.exchange import UNREAD_SECONDS

log = logging.getLogger(__name__)

BACKLOG = 2048
SOCKET_BUFFER_BYTES = 256 * 1024
"""In the kernel, each way. Left to itself it holds megabytes for each client that doesn't read,
and they count towards the Pod's memory."""
SPARE_FILES = 256
"""Open files besides connections: weights, libraries, the loop's own."""


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
    _bound_by_kernel(listener)
    return listener


def _bound_by_kernel(listener: socket.socket) -> None:
    """What each accepted connection takes over: buffers of fixed size, and an end for the vanished.

    A peer that is gone without a word is noticed when it does not acknowledge what is sent, or
    probes while nothing is.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 15),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(UNREAD_SECONDS * 1000)),
    ):
        if hasattr(socket, name):  # not every system has each of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_open_files(wanted: int) -> None:
    """Raise the soft limit of open files to `wanted`; a hard limit below it is told in the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if possible < wanted:
        log.warning(
            "this process may open fewer files than its listeners take connections",
            extra={"files": possible, "wanted": wanted},
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))


def _not_counted(reason: RefusalReason) -> None:
    """Refusals of pages for machines are no traffic of the service."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An application, its bound socket, and what it lets clients do."""

    app: ASGIApp
    socket: socket.socket
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    refused: Callable[[RefusalReason], None] = _not_counted
    dates: bool = True
    """Whether answers get a Date here, or the application gives every one its own."""


class Listeners:
    """Servers by name, started together and ended together."""

    def __init__(self, listeners: Mapping[str, Listener]) -> None:
        self._servers: dict[str, tuple[_Server, socket.socket]] = {}
        allow_open_files(SPARE_FILES + sum(each.limits.connections for each in listeners.values()))
        for name, listener in listeners.items():
            protocol: Any = partial(
                GuardedProtocol, limits=listener.limits, refused=listener.refused
            )
            config = uvicorn.Config(
                listener.app,
                http=protocol,
                ws="none",
                interface="asgi3",
                proxy_headers=False,
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=listener.dates,
                timeout_keep_alive=listener.limits.idle_seconds,
                backlog=BACKLOG,
            )
            self._servers[name] = (_Server(config), listener.socket)
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
