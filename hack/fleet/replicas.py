"""All pretended replicas in one process: `python -m hack.fleet.replicas --kubeconfig FILE`.

The Pods' addresses are local to this network namespace, so one socket per port answers for all of
them, by the address that a connection was made to. Which Pod has which address comes from a watch
of the API server. HTTP is read by hand: a server library would take more time than the answers.

A third port, on loopback, is for whoever measures: `GET /` says how many Pods are known and how
many requests were answered, `PUT /` sets rates and silence (see `Control`).
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kvscaler.protocol.limits import LimitsPut
from kvscaler.protocol.tokens import DRAIN_PATH, LIMITS_PATH
from kvscaler_api.metadata import SERVICE_UID_LABEL

from hack.demo.kube import Kube
from hack.fleet.replica import FakeReplica, page

STATE_PORT, ADMIN_PORT = 9090, 9443
BACKLOG = 4096
Answer = tuple[int, str, bytes]


@dataclass
class Control:
    """What replicas do. Rates are requests a second of one replica."""

    per_second: float = 1.0
    of_service: dict[str, float] = field(default_factory=dict)
    """Rates of single services, by name."""
    silent: bool = False
    """Whether connections are closed unanswered."""


class Fleet:
    """Replicas by address."""

    def __init__(self) -> None:
        self.control = Control()
        self.answers = 0
        self.scrapes = 0
        self._by_ip: dict[str, FakeReplica] = {}
        self._ips: dict[str, str] = {}

    def take(self, event: str, pod: dict[str, Any]) -> None:
        """One event of the watch."""
        uid, ip = pod["metadata"]["uid"], (pod.get("status") or {}).get("podIP")
        if event == "DELETED":
            self._by_ip.pop(self._ips.pop(uid, ""), None)
        elif ip and uid not in self._ips:
            labels = pod["metadata"]["labels"]
            service = labels["app.kubernetes.io/instance"]
            self._ips[uid] = ip
            self._by_ip[ip] = FakeReplica(
                labels[SERVICE_UID_LABEL], service, uid, pod["metadata"]["name"], time.time()
            )

    def targets(self) -> list[dict[str, Any]]:
        """For Prometheus' discovery over HTTP."""
        return [
            {
                "targets": [f"{ip}:{STATE_PORT}"],
                "labels": {"namespace": "fleet", "pod": replica.pod_name},
            }
            for ip, replica in self._by_ip.items()
        ]

    def answer(self, ip: str, method: str, path: str, body: bytes) -> Answer | None:
        """What the Pod with this address says; None closes the connection."""
        replica = self._by_ip.get(ip)
        if replica is None or self.control.silent:
            return None
        self.answers += 1
        if method == "PUT" and path == LIMITS_PATH:
            replica.take_limits(LimitsPut.model_validate_json(body).limits)
            return 200, "application/json", json.dumps(replica.limits).encode()
        if method == "PUT" and path == DRAIN_PATH:
            phase = "Empty" if json.loads(body)["drain"] else "Serving"
            replica.drain = {"phase": phase, "live_requests": 0}
            return 200, "application/json", json.dumps(replica.drain).encode()
        now = time.time()
        control = self.control
        replica.advance(now, control.of_service.get(replica.service_name, control.per_second))
        state = replica.state(now)
        if path == "/state":
            return 200, "application/json", json.dumps(state, separators=(",", ":")).encode()
        if path == "/metrics":
            self.scrapes += 1
            return 200, "text/plain; version=0.0.4", page(state).encode()
        return 404, "text/plain", b"no such path\n"

    def steer(self, _: str, method: str, path: str, body: bytes) -> Answer | None:
        """The port of whoever measures."""
        if path == "/targets":
            return 200, "application/json", json.dumps(self.targets()).encode()
        if method == "PUT":
            self.control = Control(**json.loads(body))
        known = {"pods": len(self._by_ip), "answers": self.answers, "scrapes": self.scrapes}
        return 200, "application/json", json.dumps(known).encode()


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as far as the operator and Prometheus use it."""

    def __init__(self, answer: Callable[[str, str, str, bytes], Answer | None]) -> None:
        self._answer = answer
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember for which Pod this connection is."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ip = str(transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head, rest = self._buffer[:end], self._buffer[end + 4 :]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            self._reply(self._answer(self._ip, method, path.partition("?")[0], body))

    def _reply(self, answer: Answer | None) -> None:
        if answer is None:
            self._transport.close()
            return
        status, kind, body = answer
        head = (
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Not Found'}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)


async def watch(kube: Kube, fleet: Fleet) -> None:
    """Follow the Pods of services until cancelled."""
    path = f"/api/v1/pods?labelSelector={SERVICE_UID_LABEL}"
    while True:
        listed = await kube.get(path)
        for pod in listed["items"]:
            fleet.take("ADDED", pod)
        version = listed["metadata"]["resourceVersion"]
        with contextlib.suppress(aiohttp.ClientError):
            async for event, pod in kube.watch(f"{path}&watch=true&resourceVersion={version}"):
                if event in ("ADDED", "MODIFIED", "DELETED"):
                    fleet.take(event, pod)


async def serve(kubeconfig: Path, control_port: int) -> None:
    """Answer until cancelled."""
    fleet, loop = Fleet(), asyncio.get_running_loop()
    for port in (STATE_PORT, ADMIN_PORT):
        await loop.create_server(
            lambda: Connection(fleet.answer), "0.0.0.0", port, backlog=BACKLOG
        )  # fmt: skip
    await loop.create_server(lambda: Connection(fleet.steer), "127.0.0.1", control_port)
    async with Kube(kubeconfig) as kube:
        await watch(kube, fleet)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--control-port", type=int, required=True)
    options = parser.parse_args(argv)
    asyncio.run(serve(options.kubeconfig, options.control_port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
