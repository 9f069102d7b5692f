"""Draining a replica: it finishes what it accepted and takes nothing new.

The operator only chooses the victim; SIGTERM alone keeps the promise that no stream breaks.
"""

from enum import StrEnum

from kvscaler.protocol.limits import PROTOCOL_VERSION, Count, Message


class DrainPhase(StrEnum):
    """Serving → Lingering (not ready, still accepting) → Draining (refusing) → Empty."""

    SERVING = "Serving"
    LINGERING = "Lingering"
    DRAINING = "Draining"
    EMPTY = "Empty"


class DrainPut(Message):
    """Body of `PUT /admin/v1/drain`: `drain=True` starts or keeps a drain, `False` ends one."""

    version: int = PROTOCOL_VERSION
    drain: bool
    timeout_seconds: float = 600.0


class DrainReport(Message):
    """Answer of `GET` and `PUT /admin/v1/drain`, and a part of `/state`."""

    version: int = PROTOCOL_VERSION
    phase: DrainPhase = DrainPhase.SERVING
    since: float | None = None
    """Unix seconds at which the drain began."""
    live_requests: Count = 0
    """Requests accepted and not yet answered in full."""
    reason: str = ""
    """`admin` or `sigterm`; a drain by SIGTERM can't be undone."""
