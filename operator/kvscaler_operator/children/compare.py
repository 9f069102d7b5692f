"""Whether a live child still says what we applied, without asking the API server.

A document is compared as a subset: what the server adds by default, and what others own, does not
matter. Lists are matched entry by entry where entries have an identity. A false difference costs
one apply that changes nothing; a missed one would leave a hand edit standing, so doubt means
"differs".
"""

import hashlib
import json
from typing import Any

from kvscaler_operator.children.merge import LIST_KEYS, identity_of
from kvscaler_operator.children.quantity import same_quantity
from kvscaler_operator.resources import Object

HASH_ANNOTATION = "kvscaler.io/applied-hash"
"""On a child: hash of the document that was applied last. It tells when a key was *removed* from
the document, which no comparison with the live object can see."""

COMPARED_KEYS = {**LIST_KEYS, "ownerReferences": ("uid",)}
QUANTITY_FIELDS = frozenset({"limits", "requests"})


def content_hash(document: Object) -> str:
    """First 16 hexadecimal digits of SHA-256 over the canonical JSON of a document."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def with_hash(document: Object) -> Object:
    """The document with the annotation that carries its own hash."""
    metadata = dict(document["metadata"])
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        HASH_ANNOTATION: content_hash(document),
    }
    return {**document, "metadata": metadata}


def difference(wanted: Any, live: Any, path: str = "", field: str = "") -> str | None:
    """Path of the first place where `live` does not say what `wanted` says; `None` if it does."""
    if isinstance(wanted, dict):
        return _dict_difference(wanted, live, path, field)
    if isinstance(wanted, list):
        return _list_difference(wanted, live, path, field)
    return None if wanted == live else path or "."


def _dict_difference(wanted: Object, live: Any, path: str, field: str) -> str | None:
    if not wanted and live is None:
        return None
    if not isinstance(live, dict):
        return path or "."
    for key, value in wanted.items():
        where = f"{path}.{key}" if path else key
        if field in QUANTITY_FIELDS and same_quantity(value, live.get(key)):
            continue
        found = difference(value, live.get(key), where, key)
        if found is not None:
            return found
    return None


def _list_difference(wanted: list[Any], live: Any, path: str, field: str) -> str | None:
    if not wanted and live is None:
        return None
    if not isinstance(live, list):
        return path
    keys = COMPARED_KEYS.get(field)
    if keys and all(isinstance(entry, dict) and keys[0] in entry for entry in wanted):
        byidentity_of = {identity_of(entry, keys): entry for entry in live}
        for entry in wanted:
            identity = identity_of(entry, keys)
            where = f"{path}[{','.join(identity)}]"
            if identity not in byidentity_of:
                return where
            found = difference(entry, byidentity_of[identity], where)
            if found is not None:
                return found
        return None
    if len(wanted) != len(live):
        return path
    for index, (ours, theirs) in enumerate(zip(wanted, live, strict=True)):
        found = difference(ours, theirs, f"{path}[{index}]")
        if found is not None:
            return found
    return None
