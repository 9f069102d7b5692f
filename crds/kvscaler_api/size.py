"""How large an object may be.

The API server takes objects of more than a megabyte, and no rule of a schema can measure a field
that it preserves unread. Every service is cached by the operator, merged into a Deployment and
stored again with each of its revisions, so a larger one is refused by a condition.
"""

import json
from typing import Any

MAX_SPEC_BYTES = 128 * 1024
"""Largest `spec`, as compact JSON in UTF-8."""


def size_fault(value: dict[str, Any]) -> str | None:
    """Why an object's spec is too large, for `SpecValid=False/TooLarge`; None when it is not."""
    spec = value.get("spec") or {}
    size = _json_bytes(spec)
    if size <= MAX_SPEC_BYTES:
        return None
    largest = max(spec, key=lambda key: _json_bytes(spec[key]))
    return (
        f"spec has {size // 1024} KiB, at most {MAX_SPEC_BYTES // 1024} KiB are handled; the"
        f" largest part is spec.{largest} with {_json_bytes(spec[largest]) // 1024} KiB: move"
        " its data into a ConfigMap or an image"
    )


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
