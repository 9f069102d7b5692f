"""No write leaves late, and none arrives late: what one operator asks for must not reach the API
server in the time of its successor.

A check before a request is not enough. Between it and the request's first byte a connection may be
made, and the process may be stopped for a minute. So the Lease is looked at again when the request
has its connection. And what was sent is not what has arrived: in a partition the kernel goes on
sending it, even for a process that has ended, and delivers it when the partition heals. So the
kernel gives up (TCP_USER_TIMEOUT, RFC 5482) on data that is not acknowledged for the time that
lies between the last moment at which a holder may write and the first at which another may begin.
"""

import socket
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace

import aiohttp
from kubernetes.aio import client as kubernetes_client

Fence = Callable[[], bool]

fence_of_request: ContextVar[Fence | None] = ContextVar("fence_of_request", default=None)
"""Set around a request that must not leave when its fence says no."""


class TooLateError(aiohttp.ClientError):
    """The request had its connection, and its fence said no."""


def give_connections(api: kubernetes_client.ApiClient, unacknowledged_seconds: float) -> None:
    """Have a client make its connections by these rules, instead of its own."""
    rest = api.rest_client
    connector = aiohttp.TCPConnector(
        limit=rest.maxsize,
        ssl=rest.ssl_context,
        socket_factory=lambda address: _socket(address, unacknowledged_seconds),
    )
    rest.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=True, read_bufsize=2**21, trace_configs=[_last_look()]
    )


def _socket(address: aiohttp.AddrInfoType, unacknowledged_seconds: float) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
    if option is not None:
        made.setsockopt(socket.IPPROTO_TCP, option, int(unacknowledged_seconds * 1000))
    return made


def _last_look() -> aiohttp.TraceConfig:
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_connected)
    trace.on_connection_reuseconn.append(_connected)
    return trace


async def _connected(session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
    fence = fence_of_request.get()
    if fence is not None and not fence():
        raise TooLateError("the lease is not held: another operator may act now")
