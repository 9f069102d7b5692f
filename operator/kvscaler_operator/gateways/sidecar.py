"""Sidecars, asked directly at their Pod's IP: what they report, and what they are told.

An answer is data from a Pod that may be broken or hostile. So: fixed ports, no redirects, at most
64 KiB, one second, strict JSON without NaN, and the answer must name the service and Pod that we
asked. Anything else is an absence with its own reason, never a zero.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import aiohttp
from kvscaler.protocol.drain import DrainPut, DrainReport
from kvscaler.protocol.limits import LimitsPut, LimitsReport, Message
from kvscaler.protocol.state import ReplicaState, unreported
from kvscaler.protocol.tokens import DRAIN_PATH, LIMITS_PATH
from pydantic import ValidationError

from kvscaler_operator.gateways.plain_http import PlainClient
from kvscaler_operator.keys import KeyFileError, SigningKey

M = TypeVar("M", bound=Message)

STATE_PATH = "/state"
MAX_ANSWER_BYTES = 64 * 1024
LARGEST_NUMBER = 1e30
"""Sums of squares stay far below; what is above is no measurement, and overflows arithmetic."""


class Fault(StrEnum):
    """Why there is no usable answer."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STATUS = "status"
    TOO_LARGE = "too-large"
    MALFORMED = "malformed"
    NOT_A_NUMBER = "not-a-number"
    PARTIAL = "partial"
    MISMATCHED = "mismatched"
    CONFLICT = "conflict"
    NO_KEY = "no-key"


class SidecarError(Exception):
    """A sidecar gave no usable answer."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One sidecar: its Pod's address, and the identity that its answers must carry."""

    service_uid: str
    pod_uid: str
    pod_name: str
    ip: str
    state_port: int
    admin_port: int

    def url(self, port: int, path: str) -> str:
        """URL of a path; the host is an IP from the Pod's status, never a name."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{port}{path}"


class SidecarGateway:
    """Talks to sidecars, at most `concurrency` at a time, each within `timeout_seconds`."""

    def __init__(
        self,
        signing_key: Callable[[], SigningKey],
        *,
        concurrency: int = 64,
        timeout_seconds: float = 1.0,
    ) -> None:
        self._signing_key = signing_key
        self._slots = asyncio.Semaphore(concurrency)
        self._seconds = timeout_seconds
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._plain = PlainClient(STATE_PATH, MAX_ANSWER_BYTES)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        self._plain.close()
        if self._session is not None:
            await self._session.close()

    async def state(self, endpoint: Endpoint) -> ReplicaState:
        """What the replica says about itself; raises `SidecarError`."""
        raw = await self._state(endpoint)
        state = _parse(ReplicaState, raw, endpoint)
        if (state.service_uid, state.pod_uid) != (endpoint.service_uid, endpoint.pod_uid):
            raise SidecarError(
                Fault.MISMATCHED,
                f"{endpoint.pod_name} at {endpoint.ip} answered as Pod {state.pod_uid} of service "
                f"{state.service_uid}, not as {endpoint.pod_uid} of {endpoint.service_uid}",
            )
        missing = unreported(state)
        if missing:
            raise SidecarError(
                Fault.PARTIAL,
                f"{endpoint.pod_name} at {endpoint.ip} does not report {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more numbers" if len(missing) > 3 else ""),
            )
        return state

    async def _state(self, endpoint: Endpoint) -> bytes:
        """The body of the answer, by the plain client if the answer is a plain one."""
        try:
            async with self._slots:
                body = await self._plain.get(endpoint.ip, endpoint.state_port, self._seconds)
        except (TimeoutError, OSError) as error:
            raise self._silent(
                "GET", endpoint.url(endpoint.state_port, STATE_PATH), error
            ) from error
        if body is not None:
            return body
        return await self._request("GET", endpoint.url(endpoint.state_port, STATE_PATH))

    def keep(self, ips: set[str]) -> None:
        """Close the connections to Pods that are gone."""
        self._plain.forget(ips)

    async def put_limits(self, endpoint: Endpoint, put: LimitsPut) -> LimitsReport:
        """Give the replica limits; raises `SidecarError`, with `CONFLICT` when its hash moved."""
        return _parse(LimitsReport, await self._put(endpoint, LIMITS_PATH, put), endpoint)

    async def put_drain(self, endpoint: Endpoint, put: DrainPut) -> DrainReport:
        """Start, keep or end a drain; raises `SidecarError`."""
        return _parse(DrainReport, await self._put(endpoint, DRAIN_PATH, put), endpoint)

    async def _put(self, endpoint: Endpoint, path: str, message: Message) -> bytes:
        body = message.model_dump_json().encode()
        try:
            token = self._signing_key().token(
                service_uid=endpoint.service_uid,
                pod_uid=endpoint.pod_uid,
                method="PUT",
                path=path,
                body=body,
            )
        except KeyFileError as error:
            raise SidecarError(Fault.NO_KEY, str(error)) from error
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        return await self._request("PUT", endpoint.url(endpoint.admin_port, path), body, headers)

    async def _request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=False, keepalive_timeout=15)
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                # 64 KiB of gzip unpack to 64 MiB before any bound could count them.
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        try:
            async with (
                self._slots,
                self._session.request(
                    method,
                    url,
                    data=body,
                    headers=headers,
                    timeout=self._timeout,
                    allow_redirects=False,
                ) as response,
            ):
                raw = await _read_bounded(response, url)
                _check_status(response.status, raw, method, url)
                return raw
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._silent(method, url, error) from error

    def _silent(self, method: str, url: str, error: Exception) -> SidecarError:
        if isinstance(error, TimeoutError):
            words = f"{method} {url} gave no answer within {self._seconds:g} s"
            return SidecarError(Fault.TIMEOUT, words)
        cause = str(error) or type(error).__name__
        return SidecarError(Fault.UNREACHABLE, f"{method} {url}: {cause}")


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > MAX_ANSWER_BYTES:
            response.close()
            raise SidecarError(
                Fault.TOO_LARGE, f"{url} answered more than {MAX_ANSWER_BYTES // 1024} KiB"
            )
    return bytes(raw)


def _check_status(status: int, raw: bytes, method: str, url: str) -> None:
    if status == 200:
        return
    words = raw[:200].decode(errors="replace")
    if 300 <= status < 400:
        words = "redirects are not followed"
    fault = Fault.CONFLICT if status in (409, 412) else Fault.STATUS
    raise SidecarError(fault, f"{method} {url} answered {status}: {words}")


class _NotFinite(ValueError):
    pass


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= LARGEST_NUMBER:
        raise _NotFinite(text[:40])
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _refuse(text: str) -> float:
    raise _NotFinite(text)


_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENT = re.compile(rb"0e\+?0+\s*(?:[,}\]]|\Z)")


def _is_suspicious(raw: bytes) -> bool:
    """Whether a JSON text may hold a number that is not finite or too large. Those of healthy
    replicas hold none, and to tell takes a twentieth of the time that looking at each would."""
    shape = raw.translate(_SHAPE)
    return (
        b"NaN" in raw
        or b"Infinity" in raw
        or b"0" * 30 in shape
        or _EXPONENT.search(shape) is not None
    )


def _parse(model: type[M], raw: bytes, endpoint: Endpoint) -> M:
    try:
        if _is_suspicious(raw):
            json.loads(raw, parse_float=_finite, parse_int=_whole, parse_constant=_refuse)
        # In one go, as every healthy replica answers; strictly, since a text such as "inf" would
        # become a number.
        return model.model_validate_json(raw, strict=True)
    except _NotFinite as error:
        raise SidecarError(
            Fault.NOT_A_NUMBER, f"{endpoint.pod_name} at {endpoint.ip} reports {error} as a number"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SidecarError(
            Fault.MALFORMED,
            f"{endpoint.pod_name} at {endpoint.ip} sent no {model.__name__}: "
            f"{where or 'body'}: {first['msg']}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise SidecarError(
            Fault.MALFORMED, f"{endpoint.pod_name} at {endpoint.ip} sent no JSON: {error}"
        ) from error
