"""An API server that fails on command: a proxy between an operator and the real one.

The faults that hurt controllers happen between requests that succeed: a watch that is cut and comes
back with an error, a list that fails once, an answer that never comes. A proxy makes them with the
real server behind it, so that everything else stays true. It speaks plain HTTP, and asks the server
as the kubeconfig's user.
"""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from kvscaler_operator.gateways.kube import connect

Object = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers in the server's place, or gives `None` and lets the request through."""

_DROPPED = frozenset({"host", "authorization", "connection", "accept-encoding", "content-length"})
CONTEXT = "faulty"


class FaultyServer:
    """Passes everything to the real API server but what `faults` answer first."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        """Verb and path of every request, a watch as `WATCH`."""
        self.url = ""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._watches: dict[web.StreamResponse, tuple[str, web.Request]] = {}
        self._runner: web.AppRunner | None = None
        self._upstream = ""
        self._tls: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession

    async def start(self, kubeconfig: Path, context: str) -> None:
        """Listen on a port of loopback, before the server that the kubeconfig names."""
        api = await connect(str(kubeconfig), context)
        access = api.configuration
        self._upstream = str(access.host)
        if self._upstream.startswith("https"):
            self._tls = ssl.create_default_context(cafile=access.ssl_ca_cert)
            self._tls.load_cert_chain(access.cert_file, access.key_file)
        await api.close()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        application = web.Application(client_max_size=16 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close everything."""
        self._flowing.set()
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig (context `CONTEXT`) that leads here."""
        named = {"name": CONTEXT}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "clusters": [{**named, "cluster": {"server": self.url}}],
            "users": [{**named, "user": {"token": "known-to-nobody"}}],
            "contexts": [{**named, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
        }
        path = folder / "faulty-kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path

    # --- faults of connections ---------------------------------------------------------------

    def swallow(self) -> None:
        """From now on nothing passes in either direction, and nothing says so."""
        self._flowing.clear()

    def flow(self) -> None:
        """Let things pass again. Connections from before are broken, as they are in life."""
        self._flowing.set()

    def cut(self, plural: str) -> None:
        """Break the open watches of a kind."""
        for response, (kind, request) in list(self._watches.items()):
            if kind == plural:
                self._watches.pop(response)
                _abort(request)

    async def send(self, plural: str, event: Object) -> int:
        """Put an event into every open watch of a kind; returns into how many."""
        watches = [r for r, (kind, _) in self._watches.items() if kind == plural]
        for response in watches:
            await response.write(json.dumps(event).encode() + b"\n")
        return len(watches)

    def watching(self, plural: str) -> int:
        """Open watches of a kind."""
        return sum(1 for kind, _ in self._watches.values() if kind == plural)

    # --- passing on --------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = is_watch(request)
        self.seen.append(("WATCH" if watch else request.method, request.path))
        await self._pass(request)
        for fault in tuple(self.faults):
            answer = await fault(request)
            if answer is not None:
                return answer
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _DROPPED}
        async with self._session.request(
            request.method,
            self._upstream + request.raw_path,
            data=body or None,
            headers=headers,
            ssl=self._tls if self._tls is not None else True,
            skip_auto_headers=("Accept-Encoding",),
        ) as upstream:
            await self._pass(request)
            response = web.StreamResponse(status=upstream.status)
            response.content_type = upstream.content_type
            if "Retry-After" in upstream.headers:
                response.headers["Retry-After"] = upstream.headers["Retry-After"]
            await response.prepare(request)
            if watch and upstream.status == 200:
                self._watches[response] = (request.path.rsplit("/", 1)[-1], request)
            try:
                async for chunk in upstream.content.iter_any():
                    await self._pass(request)
                    await response.write(chunk)
            finally:
                self._watches.pop(response, None)
            with suppress(ConnectionError):  # a client that has gone needs no end
                await response.write_eof()
            return response

    async def _pass(self, request: web.Request) -> None:
        """Wait while nothing flows; a connection that had to wait is broken afterwards."""
        if self._flowing.is_set():
            return
        await self._flowing.wait()
        _abort(request)
        raise ConnectionResetError("swallowed")


def is_watch(request: web.Request) -> bool:
    """Whether a request is a watch."""
    return request.query.get("watch", "") in ("1", "true")


def plural_of(request: web.Request) -> str:
    """The kind that a request for a collection is about, empty for a single object."""
    parts = request.path.strip("/").split("/")
    # api/v1/[namespaces/N/]PLURAL or apis/GROUP/VERSION/[namespaces/N/]PLURAL
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if len(rest) >= 2 and rest[0] == "namespaces":
        rest = rest[2:]
    return rest[0] if len(rest) == 1 else ""


def is_write(request: web.Request) -> bool:
    """Whether a request writes anything but a Lease."""
    return request.method != "GET" and "/leases" not in request.path


def refusal(
    status: int, reason: str, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An error as the API server words it."""
    body = {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": status,
        "reason": reason,
        "message": message,
    }
    return web.json_response(body, status=status, headers=headers)


def error_event(code: int, reason: str, message: str) -> Object:
    """An error as it comes within a watch."""
    status = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return {"type": "ERROR", "object": {"apiVersion": "v1", "status": "Failure", **status}}


async def gone(request: web.Request) -> web.StreamResponse:
    """What a watch gets that begins at a version which the server no longer has."""
    response = web.StreamResponse()
    response.content_type = "application/json"
    await response.prepare(request)
    event = error_event(410, "Expired", "too old resource version")
    with suppress(ConnectionError):
        await response.write(json.dumps(event).encode() + b"\n")
        await response.write_eof()
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
