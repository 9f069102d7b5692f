"""The last known state of every watched object, and what is gone.

Three sources feed it and none may turn back time: watch events, the periodic relist, and the
answers to our own writes. An object is taken in only when its resourceVersion is newer than what
is here; an object known to be deleted stays deleted, whatever an older list still says.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from kvscaler_operator.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    Object,
    Resource,
    name_of,
    namespace_of,
    uid_of,
)

TOMBSTONE_SECONDS = 900.0
WHO_WROTE_MATTERS = frozenset({INFERENCE_SERVICES, DEPLOYMENTS})
"""Kinds whose `managedFields` are read. Of all others they are dropped: half of a Pod's size, and
most of the dicts that the garbage collector would walk through."""

Key = tuple[str, str]
"""Namespace and name."""


def version_of(obj: Object) -> int:
    """The resourceVersion, which newer objects have larger (Kubernetes ≥ 1.35 says so, KEP-5504;
    servers on etcd always kept it)."""
    return int(obj["metadata"].get("resourceVersion") or 0)


class ObjectCache:
    """Objects of one kind by name and UID, indexed by one label's value."""

    def __init__(self, resource: Resource, index_label: str | None = None) -> None:
        self.resource = resource
        self._label = index_label
        self._by_key: dict[Key, Object] = {}
        self._by_uid: dict[str, Object] = {}
        self._by_label: dict[str, set[str]] = defaultdict(set)
        self._gone: dict[str, tuple[int, float]] = {}
        """By UID: version at which an object was deleted, and when we learned it."""

    def __len__(self) -> int:
        """Number of objects known."""
        return len(self._by_uid)

    def get(self, namespace: str, name: str) -> Object | None:
        """The object of this name, or `None`."""
        return self._by_key.get((namespace, name))

    def by_uid(self, uid: str) -> Object | None:
        """The object with this UID, or `None`."""
        return self._by_uid.get(uid)

    def labelled(self, value: str) -> list[Object]:
        """Objects whose index label has this value, by name."""
        found = (self._by_uid[uid] for uid in self._by_label.get(value, ()))
        return sorted(found, key=name_of)

    def all(self) -> Iterable[Object]:
        """All objects."""
        return tuple(self._by_uid.values())

    def observe(self, obj: Object) -> bool:
        """Take in an object if it is news; returns whether it was."""
        uid = uid_of(obj)
        known = self._by_uid.get(uid)
        version = version_of(obj)
        if version <= self._gone.get(uid, (0, 0.0))[0]:
            return False
        if known is not None and version_of(known) >= version:
            return False
        if self.resource not in WHO_WROTE_MATTERS:
            obj["metadata"].pop("managedFields", None)
        key = (namespace_of(obj), name_of(obj))
        previous = self._by_key.get(key)
        if previous is not None and uid_of(previous) != uid:
            if version_of(previous) > version:
                return False
            self.remove(uid_of(previous), version)
        if known is not None:
            self._unindex(known)
        self._by_uid[uid] = obj
        self._by_key[key] = obj
        self._index(obj)
        return True

    def remove(self, uid: str, version: int) -> Object | None:
        """Take out an object that was gone at `version`; returns what was known of it.

        A watch by label says the same of an object that lost its label; if it gets it back, its
        version is newer, and it is taken in again.
        """
        now = asyncio.get_running_loop().time()
        self._gone = {u: g for u, g in self._gone.items() if now - g[1] < TOMBSTONE_SECONDS}
        known = self._by_uid.get(uid)
        if known is not None and version_of(known) > version:
            return None
        self._gone[uid] = (version, now)
        if known is None:
            return None
        del self._by_uid[uid]
        self._unindex(known)
        key = (namespace_of(known), name_of(known))
        if self._by_key.get(key) is known:
            del self._by_key[key]
        return known

    def _index(self, obj: Object) -> None:
        value = self._label_of(obj)
        if value is not None:
            self._by_label[value].add(uid_of(obj))

    def _unindex(self, obj: Object) -> None:
        value = self._label_of(obj)
        if value is not None:
            self._by_label[value].discard(uid_of(obj))
            if not self._by_label[value]:
                del self._by_label[value]

    def _label_of(self, obj: Object) -> str | None:
        if self._label is None:
            return None
        value = (obj["metadata"].get("labels") or {}).get(self._label)
        return None if value is None else str(value)
