"""Which limits are in force: the replica's own, or what the operator asked for, within physics.

A writer says which limits it believes to be in force; if it is wrong it gets the hash that is and
decides again. What exceeds the replica's physical capacity is lowered to it and reported, so that
an operator with a wrong idea of a replica can't make it promise memory that it does not have.
"""

from dataclasses import dataclass

from kvscaler.protocol.limits import AdmissionLimits, LimitsPut, LimitsReport

PHYSICAL_FIELDS = ("kv_blocks", "max_sequences", "step_tokens", "max_request_tokens")
"""Fields whose own value is what the machine can do; others are policy."""


@dataclass(slots=True)
class HashConflict(Exception):
    """The limits in force are not those that the writer believed in."""

    current_hash: str


class LimitsInForce:
    """Own limits, applied limits and the last request. Used by the engine's thread only."""

    def __init__(self, own: AdmissionLimits) -> None:
        self.own = own
        self.applied = own
        self._own_hash = own.content_hash
        self._applied_hash = self._own_hash
        self._requested_hash: str | None = None
        self._clamped: tuple[str, ...] = ()

    def put(self, message: LimitsPut) -> AdmissionLimits:
        """Take the limits of `message`, lowered to what is physical, and return them.

        Raises `HashConflict` when `if_hash` is given and is not the hash in force.
        """
        if message.if_hash is not None and message.if_hash != self._applied_hash:
            raise HashConflict(self._applied_hash)
        wanted = message.limits
        clamped = tuple(
            name for name in PHYSICAL_FIELDS if getattr(wanted, name) > getattr(self.own, name)
        )
        self.applied = wanted.model_copy(update={name: getattr(self.own, name) for name in clamped})
        self._applied_hash = self.applied.content_hash
        self._requested_hash = wanted.content_hash
        self._clamped = clamped
        return self.applied

    def report(self, pending_kv_blocks: int | None) -> LimitsReport:
        """For `/state` and the admin API."""
        return LimitsReport(
            hash=self._applied_hash,
            applied=self.applied,
            own_hash=self._own_hash,
            requested_hash=self._requested_hash,
            clamped=self._clamped,
            pending_kv_blocks=pending_kv_blocks,
        )
