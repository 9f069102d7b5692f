"""An external.metrics.k8s.io API for autoscalers, as prometheus-adapter or KEDA serve one.

The API server reaches it by a Service of type ExternalName, which needs no network of a cluster.
"""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from localcluster.pki import SERVER, Authority

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"


class ExternalMetrics:
    """Serves one metric per namespace; `value` gives it, or `None` while there is none."""

    def __init__(self, server: Any, namespace: str, folder: Path) -> None:
        self.server, self.namespace, self.folder = server, namespace, folder
        self.values: dict[str, Callable[[], float | None]] = {}
        self.asked = 0
        self._runner: web.AppRunner

    async def __aenter__(self) -> "ExternalMetrics":
        authority = Authority(self.folder, "metrics-ca")
        authority.issue("metrics", "localhost", [SERVER], names=("localhost",))
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.folder / "metrics.crt", self.folder / "metrics.key")
        application = web.Application()
        application.router.add_get(ROOT, self._resources)
        application.router.add_get(ROOT + "/namespaces/{namespace}/{metric}", self._metric)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self._register(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")
        await self._runner.cleanup()

    def _register(self, port: int) -> None:
        service = {"name": "external-metrics", "namespace": self.namespace}
        self.server.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": service,
                "spec": {
                    "type": "ExternalName",
                    "externalName": "localhost",
                    "ports": [{"port": port}],
                },
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {**service, "port": port},
                },
            },
        )

    async def _resources(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [
                    {
                        "name": name,
                        "singularName": "",
                        "namespaced": True,
                        "kind": "ExternalMetricValueList",
                        "verbs": ["get"],
                    }
                    for name in self.values
                ],
            }
        )

    async def _metric(self, request: web.Request) -> web.Response:
        self.asked += 1
        name = request.match_info["metric"]
        found = self.values.get(name)
        value = found() if found and request.match_info["namespace"] == self.namespace else None
        items = [] if value is None else [_item(name, value)]
        return web.json_response(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": f"{GROUP}/{VERSION}",
                "metadata": {},
                "items": items,
            }
        )


def _item(name: str, value: float) -> dict[str, Any]:
    return {
        "metricName": name,
        "metricLabels": {},
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": f"{round(value * 1000)}m",
    }
