"""Kopf in a thread and an event loop of its own.

When Kopf stops, for whatever reason, it cancels every task of its loop that it does not know, and it
counts on a loop that is never busy. On a loop of its own it can do neither harm nor be harmed; what it
sees is handed over to ours, where caches and queue live.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kopf
from kubernetes.aio import client as kubernetes_client

from kvscaler_operator import handlers
from kvscaler_operator.resources import Object, Resource
from kvscaler_operator.settings import Settings

STOP_SECONDS = 8.0

Take = Callable[[Resource, str | None, Object], None]


async def run_watches(settings: Settings, api: kubernetes_client.ApiClient, take: Take) -> None:
    """Watch until cancelled; ends with an error when Kopf does. `take` runs on this loop."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    def hand_over(resource: Resource, event_type: str | None, obj: Object) -> None:
        if not stop.is_set():
            loop.call_soon_threadsafe(take, resource, event_type, obj)

    pool = ThreadPoolExecutor(1, thread_name_prefix="kopf")
    watching = loop.run_in_executor(pool, _watch, settings, api.configuration, hand_over, stop)
    try:
        await asyncio.shield(watching)
        raise RuntimeError("Kopf ended without being asked to")
    finally:
        stop.set()
        # What Kopf says while its connections are closed under it is no news.
        logging.getLogger("kopf").setLevel(logging.CRITICAL)
        await asyncio.wait({watching}, timeout=STOP_SECONDS)
        pool.shutdown(wait=False)


def _watch(settings: Settings, access: Any, take: Take, stop: threading.Event) -> None:
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # It would like to handle signals, which is ours to do.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    registry = kopf.OperatorRegistry()
    kopf_settings = kopf.OperatorSettings()
    handlers.watch_settings(kopf_settings)
    handlers.register(registry, take)
    _register_login(registry, access, settings)

    async def watch() -> None:
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings,
                standalone=True,
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                stop_flag=stop,
            )
        finally:
            # Kopf waits for the flag in a thread of its own, which the end of this loop waits for in
            # turn: without this, Kopf's end by an error would never be heard of.
            stop.set()

    asyncio.run(watch())


def _register_login(registry: kopf.OperatorRegistry, access: Any, settings: Settings) -> None:
    """Kopf has connections of its own; they go where the gateway's go."""

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        if not settings.kubeconfig:
            return kopf.login_with_service_account(**kwargs)
        scheme, _, token = (access.api_key.get("BearerToken") or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=access.host,
            ca_path=access.ssl_ca_cert,
            certificate_path=access.cert_file,
            private_key_path=access.key_file,
            insecure=not access.verify_ssl,
            scheme=scheme or None,
            token=token or None,
        )
