"""Refusals as exceptions, and their one translation into OpenAI's error shape.

Whatever goes wrong with a request before its response starts is raised as `Refusal`; the reason
decides the status, so a caller can't pair a reason with the wrong one.
"""

import math
from dataclasses import dataclass
from typing import Any

from kvscaler.engine.admission import Refusal as AdmissionRefusal
from kvscaler.protocol.refusals import (
    CAPACITY_REASONS,
    REASON_HEADER,
    STATUS_OF,
    RefusalReason,
)

RETRY_AFTER_UNKNOWN_SECONDS = 1.0
"""Retry-After before the first step has been timed."""

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_CODE_OF_REASON = {
    RefusalReason.UNKNOWN_MODEL: "model_not_found",
    RefusalReason.CONTEXT_TOO_LONG: "context_length_exceeded",
    RefusalReason.UNSUPPORTED_FIELD: "unsupported_parameter",
    RefusalReason.INVALID_REQUEST: "invalid_value",
}
"""Codes that OpenAI's own API uses; other reasons are their own code."""


@dataclass(slots=True)
class Refusal(Exception):
    """A request that is answered with an error. `message` says object, cause and next step."""

    reason: RefusalReason
    message: str
    param: str | None = None
    """Dotted path of the field at fault."""
    retry_after_seconds: float | None = None
    """When trying again makes sense; absent where waiting does not help."""
    counted: bool = False
    """Whether the engine's own counters have it already."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def status(self) -> int:
        """HTTP status of the reason."""
        return STATUS_OF[self.reason]

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(
            self.status,
            self.message,
            self.param,
            _CODE_OF_REASON.get(self.reason, str(self.reason)),
        )

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The reason, and Retry-After in whole seconds (at least 1) where there is one."""
        headers = [(REASON_HEADER, str(self.reason))]
        if self.retry_after_seconds is not None:
            headers.append(("retry-after", str(max(1, math.ceil(self.retry_after_seconds)))))
        return headers


def refusal_by_admission(refused: AdmissionRefusal) -> Refusal:
    """What a client is told of a refusal by admission, which has counted it."""
    retry = refused.retry_after_seconds
    if retry is None and refused.reason in CAPACITY_REASONS:
        retry = RETRY_AFTER_UNKNOWN_SECONDS
    message = refused.message[:1].upper() + refused.message[1:] + "."
    return Refusal(refused.reason, message, retry_after_seconds=retry, counted=True)


def quoted(text: str, limit: int = 100) -> str:
    """A client's own words for use in an answer: quoted, and never long."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = _TYPE_OF_STATUS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
