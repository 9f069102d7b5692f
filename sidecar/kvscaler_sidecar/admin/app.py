"""Port 9443: `/admin/v1/limits` and `/admin/v1/drain`, each behind a signed token.

The token is checked before the body is read, and again with it: who has none gets no room here. Answers to a denied request are constant per
reason, so they tell an attacker nothing; the log says more.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from kvscaler.protocol.drain import DrainPut, DrainReport
from kvscaler.protocol.limits import PROTOCOL_VERSION, LimitsPut, LimitsReport
from kvscaler.protocol.tokens import DRAIN_PATH, LIMITS_PATH, required_scope
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from kvscaler_sidecar.admin.limits import HashConflict
from kvscaler_sidecar.admin.verifier import Denied, TokenVerifier
from kvscaler_sidecar.drain import ADMIN, Drain
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.exchange import ClientGone, Exchange

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024

Body = TypeVar("Body", bound=BaseModel)


class EngineUnavailable(Exception):
    """The engine is not there, or did not answer in time; says which."""


class LimitsControl(Protocol):
    """The engine's limits as the admin API uses them. Both raise `EngineUnavailable`."""

    async def limits_report(self) -> LimitsReport:
        """What is in force."""
        ...

    async def put_limits(self, message: LimitsPut) -> LimitsReport:
        """Apply limits; raises `HashConflict` when the writer believed in others."""
        ...


class BadBody(Exception):
    """The body of an admin request can't be used; says why."""


class AdminServer:
    """The application."""

    def __init__(self, verifier: TokenVerifier, limits: LimitsControl, drain: Drain) -> None:
        self._verifier = verifier
        self._limits = limits
        self._drain = drain
        self._handlers: dict[tuple[str, str], Callable[[bytes], Awaitable[BaseModel]]] = {
            ("GET", LIMITS_PATH): self._get_limits,
            ("PUT", LIMITS_PATH): self._put_limits,
            ("GET", DRAIN_PATH): self._get_drain,
            ("PUT", DRAIN_PATH): self._put_drain,
        }

    def app(self) -> ASGIApp:
        """The ASGI application."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._serve(Exchange(scope, receive, send), scope["method"], scope["path"])

        return serve

    async def _serve(self, exchange: Exchange, method: str, path: str) -> None:
        try:
            scope = required_scope(method, path)
            if scope is None:
                await _error(exchange, 404, "NotFound", f"there is no {method} {path} here")
                return
            token = exchange.header(b"authorization")
            self._verifier.verify_head(token, scope, method, path)
            body = await exchange.read_body(MAX_BODY_BYTES)
            self._verifier.verify(token, scope, method, path, body)
            answer = await self._handlers[(method, path)](body)
            await exchange.send_json(200, answer.model_dump(mode="json"))
        except ClientGone:
            return
        except Refusal as refusal:
            await _error(exchange, refusal.status, str(refusal.reason), refusal.message)
        except Denied as denied:
            log.warning("admin request denied", extra={"reason": denied.reason, "path": path})
            extra = [("www-authenticate", "Bearer")] if denied.status == 401 else []
            await _error(exchange, denied.status, denied.reason, "the token was refused", extra)
        except BadBody as bad:
            await _error(exchange, 400, "InvalidBody", str(bad))
        except HashConflict as conflict:
            await exchange.send_json(
                409,
                {
                    "error": {"reason": "HashConflict", "message": "other limits are in force"},
                    "hash": conflict.current_hash,
                },
            )
        except DrainFinal as final:
            await _error(exchange, 409, "DrainIsFinal", str(final))
        except EngineUnavailable as unavailable:
            await _error(
                exchange, 503, "EngineUnavailable", str(unavailable), [("retry-after", "1")]
            )

    async def _get_limits(self, body: bytes) -> LimitsReport:
        return await self._limits.limits_report()

    async def _put_limits(self, body: bytes) -> LimitsReport:
        message = _parse(body, LimitsPut)
        report = await self._limits.put_limits(message)
        log.info(
            "limits set",
            extra={
                "hash": report.hash,
                "requested_hash": report.requested_hash,
                "kv_blocks": report.applied.kv_blocks,
                "clamped": ",".join(report.clamped),
            },
        )
        return report

    async def _get_drain(self, body: bytes) -> DrainReport:
        return self._drain.report()

    async def _put_drain(self, body: bytes) -> DrainReport:
        message = _parse(body, DrainPut)
        if not 0 <= message.timeout_seconds < float("inf"):
            raise BadBody(f"timeout_seconds: {message.timeout_seconds} is no time")
        if message.drain:
            self._drain.begin(ADMIN, message.timeout_seconds)
        elif not self._drain.cancel():
            raise DrainFinal("this replica got SIGTERM; it can't go back to serving")
        report = self._drain.report()
        log.info("drain set", extra={"phase": str(report.phase), "live": report.live_requests})
        return report


class DrainFinal(Exception):
    """A drain that can't be taken back."""


def _parse(body: bytes, model: type[Body]) -> Body:
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadBody(f"{path}: {first['msg']}") from None
    version = getattr(message, "version", PROTOCOL_VERSION)
    if version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise BadBody(
            f"version: {version} is not understood; this replica speaks {PROTOCOL_VERSION}"
        )
    return message


async def _error(
    exchange: Exchange,
    status: int,
    reason: str,
    message: str,
    headers: list[tuple[str, str]] | None = None,
) -> None:
    body: dict[str, Any] = {"error": {"reason": reason, "message": message}}
    await exchange.send_json(status, body, headers or [])
