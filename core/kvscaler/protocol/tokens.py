"""Claims of the short-lived tokens that guard what changes a replica.

A token is bound to one Pod (audience), one right (scope) and one request (method, path, hash of
the body), so that it is worthless anywhere else, and to 60 seconds. Signing and verifying need a
cryptographic library and live with the operator and the sidecar; what is signed is agreed here.
"""

import base64
import hashlib
from enum import StrEnum

from kvscaler.protocol.limits import Message

ISSUER = "kvscaler-operator"
ALGORITHM = "EdDSA"
LIFETIME_SECONDS = 60
CLOCK_SKEW_SECONDS = 30

LIMITS_PATH = "/admin/v1/limits"
DRAIN_PATH = "/admin/v1/drain"


class Scope(StrEnum):
    """Rights that a token can carry, one each."""

    LIMITS_READ = "limits:read"
    LIMITS_WRITE = "limits:write"
    DRAIN_READ = "drain:read"
    DRAIN_WRITE = "drain:write"


class AdminClaims(Message):
    """Claims of one admin token, by the names of RFC 7519 and RFC 9449 (`htm`, `htu`)."""

    iss: str
    aud: str
    scope: Scope
    htm: str
    htu: str
    bsh: str
    iat: int
    exp: int
    jti: str


def audience(service_uid: str, pod_uid: str) -> str:
    """The audience of a token for one Pod of one service."""
    return f"{service_uid}/{pod_uid}"


def body_hash(body: bytes) -> str:
    """Unpadded base64url of SHA-256 over the request's body; an empty body counts as such."""
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def key_id(raw_public_key: bytes) -> str:
    """First 16 hexadecimal digits of SHA-256 over the raw 32-byte Ed25519 public key."""
    return hashlib.sha256(raw_public_key).hexdigest()[:16]


def required_scope(method: str, path: str) -> Scope | None:
    """The right that a request needs; `None` for a path or method that does not exist."""
    table = {
        ("GET", LIMITS_PATH): Scope.LIMITS_READ,
        ("PUT", LIMITS_PATH): Scope.LIMITS_WRITE,
        ("GET", DRAIN_PATH): Scope.DRAIN_READ,
        ("PUT", DRAIN_PATH): Scope.DRAIN_WRITE,
    }
    return table.get((method, path))
