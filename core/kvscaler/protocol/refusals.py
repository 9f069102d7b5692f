"""Reasons for which a replica refuses a request: value of `x-kvscaler-reason` and metric label."""

from enum import StrEnum

REASON_HEADER = "x-kvscaler-reason"


class RefusalReason(StrEnum):
    """Stable names; each is one HTTP status (see `STATUS_OF`)."""

    INVALID_REQUEST = "InvalidRequest"
    UNSUPPORTED_FIELD = "UnsupportedField"
    UNKNOWN_MODEL = "UnknownModel"
    REQUEST_TIMEOUT = "RequestTimeout"
    BODY_TOO_LARGE = "BodyTooLarge"
    CONTEXT_TOO_LONG = "ContextTooLong"
    NEVER_FITS = "NeverFits"
    QUEUE_FULL = "QueueFull"
    QUEUE_TOKENS_FULL = "QueueTokensFull"
    QUEUE_BYTES_FULL = "QueueBytesFull"
    QUEUE_TIMEOUT = "QueueTimeout"
    DRAINING = "Draining"
    NOT_READY = "NotReady"
    CONNECTIONS_FULL = "ConnectionsFull"
    ENGINE_FAILED = "EngineFailed"
    ENGINE_UNREACHABLE = "EngineUnreachable"
    ENGINE_TIMEOUT = "EngineTimeout"
    ENGINE_BROKE = "EngineBroke"
    ENGINE_REFUSED = "EngineRefused"
    UPGRADE_UNSUPPORTED = "UpgradeUnsupported"


STATUS_OF: dict[RefusalReason, int] = {
    RefusalReason.INVALID_REQUEST: 400,
    RefusalReason.UNSUPPORTED_FIELD: 400,
    RefusalReason.UNKNOWN_MODEL: 404,
    RefusalReason.REQUEST_TIMEOUT: 408,
    RefusalReason.BODY_TOO_LARGE: 413,
    RefusalReason.CONTEXT_TOO_LONG: 413,
    RefusalReason.NEVER_FITS: 413,
    RefusalReason.QUEUE_FULL: 429,
    RefusalReason.QUEUE_TOKENS_FULL: 429,
    RefusalReason.QUEUE_BYTES_FULL: 429,
    RefusalReason.QUEUE_TIMEOUT: 503,
    RefusalReason.DRAINING: 503,
    RefusalReason.NOT_READY: 503,
    RefusalReason.CONNECTIONS_FULL: 503,
    RefusalReason.ENGINE_FAILED: 503,
    RefusalReason.ENGINE_UNREACHABLE: 503,
    RefusalReason.ENGINE_TIMEOUT: 504,
    RefusalReason.ENGINE_BROKE: 502,
    RefusalReason.ENGINE_REFUSED: 502,  # never sent: a gate passes the engine's own answer on
    RefusalReason.UPGRADE_UNSUPPORTED: 501,
}

CAPACITY_REASONS: frozenset[RefusalReason] = frozenset(
    {
        RefusalReason.QUEUE_FULL,
        RefusalReason.QUEUE_TOKENS_FULL,
        RefusalReason.QUEUE_BYTES_FULL,
        RefusalReason.QUEUE_TIMEOUT,
    }
)
"""Refusals that more capacity would have avoided: they count as demand."""
