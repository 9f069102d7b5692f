"""A user's Pod template with our keys laid over it, lists merged by their keys.

The merge follows the list keys of the API's own types, as server-side apply would. It is done here
and applied as one document, since two appliers with two documents would mean two rollouts. What
has no known key is replaced whole.
"""

from typing import Any

from kvscaler_operator.resources import Object

LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
}
"""Fields of a PodSpec whose entries have an identity, and the fields that make it."""

DEFAULTS = {"protocol": "TCP"}


def merged(theirs: Any, ours: Any, field: str = "") -> Any:
    """`theirs` with everything that `ours` says laid over it; neither is changed."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        result: Object = dict(theirs)
        for key, value in ours.items():
            result[key] = merged(result[key], value, key) if key in result else value
        return result
    keys = LIST_KEYS.get(field)
    if keys and isinstance(theirs, list) and isinstance(ours, list):
        return _merged_lists(theirs, ours, keys)
    return ours


def _merged_lists(theirs: list[Any], ours: list[Any], keys: tuple[str, ...]) -> list[Any]:
    overlay = {identity_of(entry, keys): entry for entry in ours}
    result = []
    for entry in theirs:
        identity = identity_of(entry, keys)
        result.append(merged(entry, overlay.pop(identity)) if identity in overlay else entry)
    return result + list(overlay.values())


def identity_of(entry: Any, keys: tuple[str, ...]) -> tuple[str, ...]:
    """What tells one entry of a list from the others."""
    if not isinstance(entry, dict):
        return (repr(entry),)
    return tuple(str(entry.get(key, DEFAULTS.get(key))) for key in keys)
