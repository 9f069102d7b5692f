"""A few reads of the API server and of Pods, by kubeconfig: the demo looks, it does not steer."""

import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml


class Kube:
    """Reads as the kubeconfig's user. Use as an asynchronous context manager."""

    def __init__(self, kubeconfig: Path, context: str | None = None) -> None:
        config = yaml.safe_load(kubeconfig.read_text("utf-8"))
        name = context or config["current-context"]
        chosen = next(c["context"] for c in config["contexts"] if c["name"] == name)
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == chosen["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == chosen["user"])
        self.server: str = cluster["server"]
        self._tls = ssl.create_default_context(
            cadata=_bytes(cluster, "certificate-authority").decode()
        )
        with tempfile.NamedTemporaryFile() as cert, tempfile.NamedTemporaryFile() as key:
            cert.write(_bytes(user, "client-certificate"))
            key.write(_bytes(user, "client-key"))
            cert.flush()
            key.flush()
            self._tls.load_cert_chain(cert.name, key.name)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """JSON at `path` of the API server; raises `aiohttp.ClientError` on failure."""
        async with self._session.get(self.server + path, ssl=self._tls) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def watch(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Type and object of every event of a watch, until the server ends it."""
        endless = aiohttp.ClientTimeout(total=None)
        url = self.server + path
        async with self._session.get(url, ssl=self._tls, timeout=endless) as response:
            response.raise_for_status()
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield str(event["type"]), event["object"]

    async def text(self, path: str) -> str:
        """Text at `path` of the API server (logs, metrics)."""
        async with self._session.get(self.server + path, ssl=self._tls) as response:
            response.raise_for_status()
            return await response.text()

    async def pod_json(self, ip: str, port: int, path: str) -> Any:
        """JSON that a Pod itself serves."""
        async with self._session.get(
            f"http://{ip}:{port}{path}", timeout=aiohttp.ClientTimeout(total=2)
        ) as response:
            response.raise_for_status()
            return await response.json(content_type=None)


def _bytes(section: dict[str, Any], name: str) -> bytes:
    if data := section.get(f"{name}-data"):
        return base64.b64decode(data)
    return Path(section[name]).read_bytes()
