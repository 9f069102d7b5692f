"""A store that answers as the API server's gateway does, for tests on virtual time."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from kvscaler_operator.gateways.kube import ConflictError, Listing, NotFoundError
from kvscaler_operator.resources import Object, Resource, name_of, namespace_of


class FakeKube:
    """Objects by kind, namespace and name, with resource versions and conflicts.

    `fault`, if set, is awaited before each call and may raise or never return.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = 100
        self.calls: list[tuple[str, str]] = []
        self.fault: Callable[[str], Any] | None = None

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        await self._begin("GET", name)
        return copy.deepcopy(self._stored(resource, namespace or "", name))

    async def list(
        self, resource: Resource, namespace: str | None = None, label_selector: str = ""
    ) -> Listing:
        await self._begin("LIST", resource.plural)
        items = [
            copy.deepcopy(obj)
            for (plural, where, _), obj in self.objects.items()
            if plural == resource.plural and namespace in (None, where)
        ]
        return Listing(items, self.version)

    async def create(self, resource: Resource, document: Object, *, limited: bool = True) -> Object:
        await self._begin("POST", name_of(document))
        key = (resource.plural, namespace_of(document), name_of(document))
        if key in self.objects:
            raise ConflictError(409, "AlreadyExists", "exists", name_of(document))
        return self.put(resource, document)

    async def replace(
        self, resource: Resource, document: Object, *, limited: bool = True
    ) -> Object:
        await self._begin("PUT", name_of(document))
        known = self._stored(resource, namespace_of(document), name_of(document))
        if document["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", "modified", name_of(document))
        return self.put(resource, document)

    async def merge(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Object,
        subresource: str | None = None,
    ) -> Object:
        await self._begin("PATCH", name)
        known = self._stored(resource, namespace, name)
        return self.put(resource, {**known, **patch})

    def put(self, resource: Resource, document: Object) -> Object:
        """Store an object as somebody else would."""
        self.version += 1
        stored = copy.deepcopy(document)
        stored["metadata"].setdefault("uid", f"uid-{self.version}")
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.objects[resource.plural, namespace_of(stored), name_of(stored)] = stored
        return copy.deepcopy(stored)

    def drop(self, resource: Resource, obj: Object) -> None:
        """Delete an object as somebody else would."""
        self.version += 1
        del self.objects[resource.plural, namespace_of(obj), name_of(obj)]

    def _stored(self, resource: Resource, namespace: str, name: str) -> Object:
        try:
            return self.objects[resource.plural, namespace, name]
        except KeyError:
            raise NotFoundError(404, "NotFound", "not there", name) from None

    async def _begin(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        await asyncio.sleep(0)
        if self.fault is not None:
            await self.fault(verb)


def made(name: str, uid: str, version: int, **labels: str) -> Object:
    """A bare object."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": labels,
        },
    }
