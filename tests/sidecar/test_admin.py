"""The admin API: who may change a replica, and what a change does."""

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from kvscaler.protocol.drain import DrainPhase
from kvscaler.protocol.limits import AdmissionLimits, LimitsReport
from kvscaler.protocol.tokens import DRAIN_PATH, LIMITS_PATH, body_hash, key_id
from kvscaler_sidecar.admin.verifier import KeyFolder

from tests.sidecar.replicas import ParrotExecutor, Running, running


class Signer:
    """What the operator does: one key, tokens for one Pod."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        public = self.key.public_key()
        self.kid = key_id(public.public_bytes(Encoding.Raw, PublicFormat.Raw))
        self.pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def publish(self, folder: Path, name: str = "current.pem") -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(self.pem)

    def token(self, method: str, path: str, body: bytes = b"", **claims: Any) -> str:
        now = int(time.time())
        scope = f"{path.rsplit('/', 1)[-1]}:{'write' if method == 'PUT' else 'read'}"
        payload = {
            "iss": "kvscaler-operator",
            "aud": "service-1/pod-1",
            "scope": scope,
            "htm": method,
            "htu": path,
            "bsh": body_hash(body),
            "iat": now,
            "exp": now + 60,
            "jti": secrets.token_hex(16),
        }
        payload.update(claims)
        payload = {name: value for name, value in payload.items() if value is not None}
        return jwt.encode(payload, self.key, algorithm="EdDSA", headers={"kid": self.kid})


async def send(
    replica: Running,
    signer: Signer,
    method: str,
    path: str,
    body: Any = None,
    token: str | None = None,
    **claims: Any,
) -> httpx.Response:
    content = b"" if body is None else json.dumps(body).encode()
    token = signer.token(method, path, content, **claims) if token is None else token
    return await replica.client.request(
        method,
        replica.url("admin", path),
        content=content,
        headers={"authorization": f"Bearer {token}"},
    )


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    made = Signer()
    made.publish(tmp_path / "keys")
    return made


async def test_limits_are_own_until_put(tmp_path: Path, signer: Signer) -> None:
    async with running(tmp_path) as replica:
        answer = await send(replica, signer, "GET", LIMITS_PATH)
        report = LimitsReport.model_validate_json(answer.content)
        state = await replica.state()
    assert answer.status_code == 200
    assert report.hash == report.own_hash == report.applied.content_hash
    assert report.requested_hash is None
    assert report.applied.kv_blocks == 64
    assert state.limits == report


async def test_put_is_compare_and_set_and_clamped(tmp_path: Path, signer: Signer) -> None:
    async with running(tmp_path) as replica:
        own = LimitsReport.model_validate_json(
            (await send(replica, signer, "GET", LIMITS_PATH)).content
        )
        tight = own.applied.model_copy(update={"kv_blocks": 16, "max_sequences": 2})
        put = {"if_hash": own.hash, "limits": tight.model_dump(mode="json")}
        first = await send(replica, signer, "PUT", LIMITS_PATH, put)
        report = LimitsReport.model_validate_json(first.content)
        stale = await send(replica, signer, "PUT", LIMITS_PATH, put)
        huge = own.applied.model_copy(update={"kv_blocks": 10_000})
        clamped = LimitsReport.model_validate_json(
            (
                await send(
                    replica, signer, "PUT", LIMITS_PATH, {"limits": huge.model_dump(mode="json")}
                )
            ).content
        )
        text = await replica.metrics()
    assert (first.status_code, report.applied) == (200, tight)
    assert report.requested_hash == tight.content_hash
    assert report.own_hash == own.hash
    assert stale.status_code == 409
    assert stale.json()["hash"] == tight.content_hash
    assert clamped.applied.kv_blocks == 64
    assert clamped.clamped == ("kv_blocks",)
    assert clamped.requested_hash == huge.content_hash
    assert clamped.hash == own.hash
    assert "kvscaler_limit_kv_blocks 64.0" in text
    assert f'hash="{own.hash}"' in text


async def test_a_lowered_limit_is_enforced_and_pending_until_reached(
    tmp_path: Path, signer: Signer
) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as replica:
        own = LimitsReport.model_validate_json(
            (await send(replica, signer, "GET", LIMITS_PATH)).content
        )
        await replica.complete("warm", max_tokens=1)
        tight: AdmissionLimits = own.applied.model_copy(update={"kv_blocks": 8})
        body = {"limits": tight.model_dump(mode="json")}
        answer = await send(replica, signer, "PUT", LIMITS_PATH, body)
        assert answer.status_code == 200
        never = await replica.complete("a" * 40, max_tokens=20)
        fits = await replica.complete("a" * 20, max_tokens=12)
    assert never.status_code == 413
    assert never.headers["x-kvscaler-reason"] == "NeverFits"
    assert fits.status_code == 200


async def test_bad_bodies(tmp_path: Path, signer: Signer) -> None:
    async with running(tmp_path) as replica:
        cases: list[tuple[str, Any]] = [
            (LIMITS_PATH, {"limits": {"kv_blocks": 5}}),
            (LIMITS_PATH, []),
            (DRAIN_PATH, {"drain": "maybe"}),
            (DRAIN_PATH, {"version": 9, "drain": True}),
            (DRAIN_PATH, {"drain": True, "timeout_seconds": -1}),
            (DRAIN_PATH, {"drain": True, "timeout_seconds": float("inf")}),
        ]
        for path, body in cases:
            answer = await send(replica, signer, "PUT", path, body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["reason"] == "InvalidBody"
        large = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": True, "x": "y" * 70_000})
        assert large.status_code == 413
        assert (await send(replica, signer, "DELETE", DRAIN_PATH)).status_code == 404
        assert (await replica.state()).drain.phase is DrainPhase.SERVING


async def test_drain_and_undrain(tmp_path: Path, signer: Signer) -> None:
    async with running(tmp_path) as replica:
        began = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": True})
        assert began.status_code == 200
        assert began.json()["reason"] == "admin"
        seen = await send(replica, signer, "GET", DRAIN_PATH)
        assert seen.json()["phase"] in {"Draining", "Empty"}
        back = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": False})
        assert back.json()["phase"] == "Serving"
        assert (await replica.complete("abc")).status_code == 200


async def test_sigterm_can_not_be_taken_back(tmp_path: Path, signer: Signer) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as replica:
        executor.gate.clear()
        stream = asyncio.create_task(replica.complete("abc", max_tokens=2))
        await replica.stepping()
        replica.replica.begin_end()
        answer = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": False})
        assert answer.status_code == 409
        assert answer.json()["error"]["reason"] == "DrainIsFinal"
        executor.gate.set()
        assert (await stream).status_code == 200


DENIED: list[tuple[dict[str, Any], int, str]] = [
    ({"aud": "service-1/pod-2"}, 403, "WrongAudience"),
    ({"aud": "service-2/pod-1"}, 403, "WrongAudience"),
    ({"scope": "limits:write"}, 403, "WrongScope"),
    ({"scope": "drain:read"}, 403, "WrongScope"),
    ({"htm": "GET"}, 403, "WrongRequest"),
    ({"htu": LIMITS_PATH}, 403, "WrongRequest"),
    ({"bsh": body_hash(b"other")}, 403, "WrongRequest"),
    ({"iss": "someone"}, 401, "TokenInvalid"),
    ({"exp": 1_000_000, "iat": 999_990}, 401, "TokenExpired"),
    ({"exp": int(time.time()) + 7200}, 401, "TokenInvalid"),
    ({"iat": int(time.time()) + 3600, "exp": int(time.time()) + 3650}, 401, "TokenInvalid"),
    ({"jti": None}, 401, "TokenInvalid"),
    ({"scope": "everything"}, 401, "TokenInvalid"),
]


async def test_forged_tokens(tmp_path: Path, signer: Signer) -> None:
    body = {"drain": True}
    async with running(tmp_path) as replica:
        for claims, status, reason in DENIED:
            answer = await send(replica, signer, "PUT", DRAIN_PATH, body, **claims)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
            assert answer.json()["error"]["message"] == "the token was refused"
        stranger = Signer()
        unknown = await send(replica, stranger, "PUT", DRAIN_PATH, body)
        stranger.kid = signer.kid
        forged = await send(replica, stranger, "PUT", DRAIN_PATH, body)
        none = jwt.encode({"aud": "service-1/pod-1"}, None, algorithm="none")
        unsigned = await send(replica, signer, "PUT", DRAIN_PATH, body, token=none)
        secret = jwt.encode({"a": 1}, "k" * 32, algorithm="HS256", headers={"kid": signer.kid})
        symmetric = await send(replica, signer, "PUT", DRAIN_PATH, body, token=secret)
        missing = await replica.client.put(replica.url("admin", DRAIN_PATH), json=body)
        basic = await replica.client.put(
            replica.url("admin", DRAIN_PATH), json=body, headers={"authorization": "Basic eA=="}
        )
        assert (await replica.state()).drain.phase is DrainPhase.SERVING
    for answer in (unknown, forged, unsigned, symmetric, basic):
        assert answer.status_code == 401
        assert answer.json()["error"]["reason"] == "TokenInvalid"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert missing.json()["error"]["reason"] == "TokenMissing"


async def test_a_token_works_once_and_for_its_body_only(tmp_path: Path, signer: Signer) -> None:
    async with running(tmp_path) as replica:
        token = signer.token("PUT", DRAIN_PATH, json.dumps({"drain": False}).encode())
        other = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": True}, token=token)
        first = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": False}, token=token)
        again = await send(replica, signer, "PUT", DRAIN_PATH, {"drain": False}, token=token)
    assert other.status_code == 403
    assert first.status_code == 200
    assert again.status_code == 401
    assert again.json()["error"]["reason"] == "TokenReplayed"


async def test_keys_rotate_without_a_gap(tmp_path: Path) -> None:
    old, new = Signer(), Signer()
    folder = tmp_path / "keys"
    old.publish(folder, "a.pem")
    async with running(tmp_path) as replica:
        assert (await send(replica, old, "GET", DRAIN_PATH)).status_code == 200
        assert (await send(replica, new, "GET", DRAIN_PATH)).status_code == 401
        new.publish(folder, "b.pem")
        assert (await send(replica, new, "GET", DRAIN_PATH)).status_code == 200
        assert (await send(replica, old, "GET", DRAIN_PATH)).status_code == 200
        (folder / "a.pem").unlink()
        assert (await send(replica, old, "GET", DRAIN_PATH)).status_code == 401
        assert (await send(replica, new, "GET", DRAIN_PATH)).status_code == 200


async def test_without_keys_nobody_may(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        answer = await send(replica, Signer(), "GET", LIMITS_PATH)
    assert answer.status_code == 401


def test_files_that_are_no_keys_are_named(tmp_path: Path, signer: Signer) -> None:
    folder = tmp_path / "keys"
    (folder / "junk.pem").write_text("not a key")
    keys = KeyFolder(folder)
    assert keys.key_ids == (signer.kid,)
    assert len(keys.problems) == 1
    assert keys.problems[0].startswith("junk.pem")


async def test_who_has_no_token_is_denied_before_a_body_is_read(tmp_path: Path) -> None:
    """A hostile Pod that sends bodies slowly must not keep the operator out."""
    async with running(tmp_path) as replica:
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.ports["admin"])
        writer.write(b"PUT /admin/v1/limits HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
    assert head.startswith(b"HTTP/1.1 401 ")
