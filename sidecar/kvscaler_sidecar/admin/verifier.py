"""Checks that an admin request carries a token that the operator signed for exactly this request.

A token is good for one Pod, one right, one method, path and body, once, for a minute. Keys come
from a folder that Kubernetes fills from a ConfigMap and swaps when it changes; two keys can be
there at a time, so that the operator can rotate without a gap. Without any key nothing is
accepted: the admin API fails closed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from kvscaler.protocol.tokens import (
    ALGORITHM,
    CLOCK_SKEW_SECONDS,
    ISSUER,
    LIFETIME_SECONDS,
    AdminClaims,
    Scope,
    body_hash,
    key_id,
)
from pydantic import ValidationError

MAX_REMEMBERED_TOKENS = 10_000
MAX_TOKEN_BYTES = 4096


@dataclass(slots=True)
class Denied(Exception):
    """Why a request is not allowed: 401 for a token that proves nothing, 403 for a wrong one."""

    status: int
    reason: str


class KeyFolder:
    """Public keys by key id, read again when the folder's files change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._keys: dict[str, Ed25519PublicKey] = {}
        self.problems: tuple[str, ...] = ()
        """Files that hold no usable key, with the cause."""

    def find(self, wanted: str) -> Ed25519PublicKey | None:
        """The key with this id, if the folder has it now."""
        self._reload_if_changed()
        return self._keys.get(wanted)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the keys that are accepted now."""
        self._reload_if_changed()
        return tuple(sorted(self._keys))

    def _reload_if_changed(self) -> None:
        found: list[tuple[str, int, int]] = []
        for path in sorted(self._folder.glob("*.pem")):
            try:
                status = path.stat()
            except OSError:  # the swap of a ConfigMap volume; the next look sees the new files
                continue
            found.append((path.name, status.st_mtime_ns, status.st_ino))
        seen = tuple(found)
        if seen == self._seen:
            return
        keys: dict[str, Ed25519PublicKey] = {}
        problems: list[str] = []
        for name, _, _ in seen:
            try:
                key = load_pem_public_key((self._folder / name).read_bytes())
            except (OSError, ValueError, UnsupportedAlgorithm) as error:
                problems.append(f"{name}: {error}")
                continue
            if not isinstance(key, Ed25519PublicKey):
                problems.append(f"{name}: not an Ed25519 public key")
                continue
            raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
            keys[key_id(raw)] = key
        self._seen, self._keys, self.problems = seen, keys, tuple(problems)


class TokenVerifier:
    """Verifies tokens for one audience and remembers those used, until they expire."""

    def __init__(self, keys: KeyFolder, audience: str, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._audience = audience
        self._clock = clock
        self._used: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def verify(
        self, authorization: str | None, scope: Scope, method: str, path: str, body: bytes
    ) -> AdminClaims:
        """The token's claims; the token is used up by this.

        Raises `Denied`, whose reasons are constant and say nothing about keys or clocks.
        """
        claims = self.verify_head(authorization, scope, method, path)
        if claims.bsh != body_hash(body):
            raise Denied(403, "WrongRequest")
        self._use_once(claims, self._clock())
        return claims

    def verify_head(
        self, authorization: str | None, scope: Scope, method: str, path: str
    ) -> AdminClaims:
        """The token's claims, before the body is there: nobody else may send us one.

        Raises `Denied`.
        """
        token = self._bearer(authorization)
        claims = self._claims(token)
        now = self._clock()
        if claims.exp + CLOCK_SKEW_SECONDS <= now:
            raise Denied(401, "TokenExpired")
        if claims.iat > now + CLOCK_SKEW_SECONDS or claims.exp - claims.iat > LIFETIME_SECONDS:
            raise Denied(401, "TokenInvalid")
        if claims.aud != self._audience:
            raise Denied(403, "WrongAudience")
        if claims.scope is not scope:
            raise Denied(403, "WrongScope")
        if (claims.htm, claims.htu) != (method, path):
            raise Denied(403, "WrongRequest")
        return claims

    @staticmethod
    def _bearer(authorization: str | None) -> str:
        if authorization is None:
            raise Denied(401, "TokenMissing")
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or not token or len(token) > MAX_TOKEN_BYTES:
            raise Denied(401, "TokenInvalid")
        return token.strip()

    def _claims(self, token: str) -> AdminClaims:
        try:
            header = jwt.get_unverified_header(token)
            key = self._keys.find(str(header.get("kid")))
            if key is None:
                raise Denied(401, "TokenInvalid")
            decoded = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                options={
                    "verify_aud": False,  # compared below, to answer 403 and not 401
                    "verify_exp": False,  # compared below, by this object's clock
                    "verify_iat": False,
                    "require": ["iss", "aud", "iat", "exp", "jti"],
                },
            )
            return AdminClaims.model_validate(decoded)
        except (jwt.PyJWTError, ValidationError, ValueError):
            raise Denied(401, "TokenInvalid") from None

    def _use_once(self, claims: AdminClaims, now: float) -> None:
        with self._lock:
            while self._used and next(iter(self._used.values())) + CLOCK_SKEW_SECONDS <= now:
                self._used.popitem(last=False)
            if claims.jti in self._used:
                raise Denied(401, "TokenReplayed")
            if len(self._used) >= MAX_REMEMBERED_TOKENS:
                raise Denied(401, "TooManyTokens")
            self._used[claims.jti] = float(claims.exp)
