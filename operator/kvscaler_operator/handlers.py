"""Kopf handlers: each takes an object into its cache and marks keys dirty; nothing else.

Only `on.event` is used: no finalizer, no annotation, no stored progress, and no returned result, so
that starting the operator writes nothing to any object.
"""

from collections.abc import Callable, Mapping
from typing import Any

import kopf
from kvscaler_api.metadata import SERVICE_UID_LABEL

from kvscaler_operator.cache import Key, ObjectCache, version_of
from kvscaler_operator.resources import (
    INFERENCE_SERVICES,
    WATCHED,
    Object,
    Resource,
    name_of,
    namespace_of,
    uid_of,
)


class EventSink:
    """Takes watch events and relist differences: caches them and finds the keys that they touch."""

    def __init__(
        self, caches: Mapping[Resource, ObjectCache], dirty: Callable[[Key], None]
    ) -> None:
        self._caches = caches
        self._dirty = dirty

    def take(self, resource: Resource, event_type: str | None, obj: Object) -> None:
        """One watch event; `event_type` is `None` for objects of the initial list."""
        cache = self._caches[resource]
        if event_type == "DELETED":
            changed = cache.remove(uid_of(obj), version_of(obj)) is not None
        else:
            changed = cache.observe(obj)
        if changed:
            self.touch(resource, obj)

    def touch(self, resource: Resource, obj: Object) -> None:
        """Mark the service that an object belongs to."""
        if resource is INFERENCE_SERVICES:
            self._dirty((namespace_of(obj), name_of(obj)))
            return
        owner = (obj["metadata"].get("labels") or {}).get(SERVICE_UID_LABEL)
        service = self._caches[INFERENCE_SERVICES].by_uid(str(owner)) if owner else None
        if service is not None:
            self._dirty((namespace_of(service), name_of(service)))


def register(
    registry: kopf.OperatorRegistry, take: Callable[[Resource, str | None, Object], None]
) -> None:
    """Watch every kind that the operator cares about."""
    for resource in WATCHED:
        _register_one(registry, take, resource)


def _register_one(
    registry: kopf.OperatorRegistry,
    take: Callable[[Resource, str | None, Object], None],
    resource: Resource,
) -> None:
    @kopf.on.event(
        resource.group,
        resource.version,
        resource.plural,
        registry=registry,
        id=resource.plural,
    )
    async def taken(event: Any, **_: Any) -> None:
        take(resource, event["type"], dict(event["object"]))


def watch_settings(settings: kopf.OperatorSettings) -> None:
    """Kopf's settings: watches that can't hang unnoticed, children by label only, no peering."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    # Watching for new kinds needs the right to read every CRD. Ours is there, or we do not start.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 270
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 15
    settings.networking.enforce_retry_after = True
    settings.queueing.idle_timeout = 2
    settings.process.ultimate_exiting_timeout = None
    for resource in WATCHED:
        if resource is not INFERENCE_SERVICES:
            key = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[key] = SERVICE_UID_LABEL
