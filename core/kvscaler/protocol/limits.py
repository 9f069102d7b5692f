"""Admission limits on the wire: what a replica enforces, and how it answers a change.

Limits are identified by the hash of their content, never by a version number: two writers that
ask for the same thing agree without talking, and a replica that restarted is recognised because
its hash went back to that of its own limits.
"""

import hashlib
import json
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]

PROTOCOL_VERSION = 1
"""Version of all messages here. A receiver accepts this one and the one before, and ignores
fields that it does not know."""


class Message(BaseModel):
    """A message that ignores unknown fields, so that versions n and n-1 understand each other."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ChargePolicy(StrEnum):
    """How many output tokens a request is charged for before its real length is known."""

    WORST_CASE = "WorstCase"  # its max_tokens
    EXPECTED = "Expected"  # the running mean of finished requests, at most its max_tokens
    PROMPT_ONLY = "PromptOnly"  # none: the engine's preemption is the only safety


class AdmissionMode(StrEnum):
    """Whether limits refuse (Enforce), only count what they would refuse (Observe), or rest."""

    ENFORCE = "Enforce"
    OBSERVE = "Observe"
    OFF = "Off"


class AdmissionLimits(Message):
    """What one replica admits.

    All blocks are KV blocks of the replica's smallest rank. `queue_*` bound what waits for
    admission; a request beyond them is refused with 429, one that can never fit with 413.
    """

    max_sequences: Positive
    kv_blocks: Positive
    step_tokens: Positive
    queue_requests: Count
    queue_tokens: Count
    queue_bytes: Count
    max_wait_seconds: Annotated[float, Field(ge=0)]
    max_request_tokens: Positive
    watermark_blocks: Count
    charge: ChargePolicy = ChargePolicy.EXPECTED
    mode: AdmissionMode = AdmissionMode.ENFORCE

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over the canonical JSON of all fields."""
        return _digest(self)


@lru_cache(maxsize=256)
def _digest(limits: AdmissionLimits) -> str:
    """Limits of a whole fleet are compared every second, and are few."""
    canonical = json.dumps(limits.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class LimitsPut(Message):
    """Body of `PUT /admin/v1/limits`: compare-and-set on the hash now in force."""

    version: int = PROTOCOL_VERSION
    if_hash: str | None = None
    """Hash that the writer believes is in force; `None` writes whatever is."""
    limits: AdmissionLimits


class LimitsReport(Message):
    """Answer of `GET` and `PUT /admin/v1/limits`, and a part of `/state`."""

    version: int = PROTOCOL_VERSION
    hash: str
    """Content hash of `applied`."""
    applied: AdmissionLimits
    own_hash: str
    """Hash of the limits that the replica computed from its own budget at start."""
    requested_hash: str | None = None
    """Hash of the last accepted PUT, before clamping; the operator compares with this one."""
    clamped: tuple[str, ...] = ()
    """Fields of the last PUT that exceeded physical capacity and were lowered to it."""
    pending_kv_blocks: int | None = None
    """Use that is still above a lowered `kv_blocks`; absent once the limit is reached."""
