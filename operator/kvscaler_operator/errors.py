"""Conditions that stop a reconcile with words for the user instead of a stack trace."""

from kvscaler_api.reasons import Reason


class Blocked(Exception):
    """A service can't be brought further for now; `reason` and the text go into a condition."""

    def __init__(self, reason: Reason, message: str, *, retry_seconds: float = 60.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_seconds = retry_seconds
