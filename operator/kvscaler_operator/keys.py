"""The operator's one Ed25519 key, and the short-lived tokens that it signs.

The key is a file that a Secret mounts (a rotated Secret changes the file, so it is read again when
its modification time changes); the operator has no right to read Secrets. Sidecars hold
public keys only, so that no Pod can speak for the operator.
"""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kvscaler.protocol import tokens


class KeyFileError(Exception):
    """The key file is missing or holds no Ed25519 private key in PEM form."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key and the name under which sidecars know its public half."""

    private: Ed25519PrivateKey
    key_id: str

    @classmethod
    def from_pem(cls, pem: bytes, where: str) -> "SigningKey":
        """Parse an unencrypted PKCS#8 PEM; `where` is named in errors."""
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise KeyFileError(
                f"{where} is no unencrypted private key in PEM form: {error}"
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise KeyFileError(
                f"{where} holds a {type(private).__name__}; an Ed25519 key is needed"
            )
        return cls(private, tokens.key_id(_raw(private)))

    @property
    def public_pem(self) -> str:
        """The public half as PEM, for the ConfigMap that sidecars read."""
        encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return self.private.public_key().public_bytes(encoding, form).decode()

    def token(
        self,
        *,
        service_uid: str,
        pod_uid: str,
        method: str,
        path: str,
        body: bytes,
        now: float | None = None,
    ) -> str:
        """A token for exactly one request to one Pod."""
        scope = tokens.required_scope(method, path)
        if scope is None:
            raise ValueError(f"the admin API has no {method} {path}")
        issued = int(time.time() if now is None else now)
        claims = tokens.AdminClaims(
            iss=tokens.ISSUER,
            aud=tokens.audience(service_uid, pod_uid),
            scope=scope,
            htm=method,
            htu=path,
            bsh=tokens.body_hash(body),
            iat=issued,
            exp=issued + tokens.LIFETIME_SECONDS,
            jti=uuid.uuid4().hex,
        )
        return jwt.encode(
            claims.model_dump(mode="json"),
            self.private,
            algorithm=tokens.ALGORITHM,
            headers={"kid": self.key_id},
        )


class KeyFile:
    """The key in a file, read again when the file changes.

    After a change the previous public key is still published (sidecars reload their keys with
    the kubelet's delay), so that two keys are known during a rotation.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._key: SigningKey | None = None
        self._previous: SigningKey | None = None

    def current(self) -> SigningKey:
        """The key to sign with; raises `KeyFileError` when there is none."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if self._key is None or stamp != self._stamp:
                key = SigningKey.from_pem(self._path.read_bytes(), str(self._path))
                if self._key is not None and key.key_id != self._key.key_id:
                    self._previous = self._key
                self._key, self._stamp = key, stamp
        except OSError as error:
            raise KeyFileError(
                f"cannot read the signing key {self._path}: {error}; the chart mounts it from the "
                "Secret that adminKey.secretName names, or that its hook made"
            ) from error
        return self._key

    def public_keys(self) -> dict[str, str]:
        """File name to PEM of every public key that sidecars should trust now."""
        keys = [self.current()] + ([self._previous] if self._previous else [])
        return {f"{key.key_id}.pem": key.public_pem for key in keys}


def _raw(private: Ed25519PrivateKey) -> bytes:
    return private.public_key().public_bytes(
        serialization.Encoding.Raw, serialization.PublicFormat.Raw
    )
