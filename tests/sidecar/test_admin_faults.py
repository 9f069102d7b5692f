"""Tokens that are not for this request, and limits beyond physics, while a request is served.

Each is refused or clamped, the request under way ends well, and the next good token works.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvscaler.protocol.drain import DrainPhase
from kvscaler.protocol.limits import LimitsReport
from kvscaler.protocol.tokens import DRAIN_PATH, LIMITS_PATH
from kvscaler_sidecar.admin.limits import PHYSICAL_FIELDS

from tests.chaos.rows import Faults
from tests.sidecar.replicas import ParrotExecutor, Running, running
from tests.sidecar.test_admin import Signer, send

pytestmark = pytest.mark.fault
DRAIN, SERVE = {"drain": True}, {"drain": False}
Attack = Callable[[Running, Signer], Awaitable[httpx.Response]]


async def replayed(replica: Running, signer: Signer) -> httpx.Response:
    token = signer.token("PUT", DRAIN_PATH, json.dumps(SERVE).encode())
    first = await send(replica, signer, "PUT", DRAIN_PATH, SERVE, token=token)
    assert first.status_code == 200
    return await send(replica, signer, "PUT", DRAIN_PATH, SERVE, token=token)


async def expired(replica: Running, signer: Signer) -> httpx.Response:
    minutes_ago = int(time.time()) - 300
    return await send(
        replica, signer, "PUT", DRAIN_PATH, DRAIN, iat=minutes_ago, exp=minutes_ago + 60
    )


async def not_yet(replica: Running, signer: Signer) -> httpx.Response:
    tomorrow = int(time.time()) + 86_400
    return await send(replica, signer, "PUT", DRAIN_PATH, DRAIN, iat=tomorrow, exp=tomorrow + 60)


async def anothers(replica: Running, signer: Signer) -> httpx.Response:
    return await send(replica, signer, "PUT", DRAIN_PATH, DRAIN, aud="service-1/pod-2")


@pytest.mark.parametrize(
    ("name", "attack", "status", "reason"),
    [
        ("a replayed token", replayed, 401, "TokenReplayed"),
        ("an expired token", expired, 401, "TokenExpired"),
        ("a token of tomorrow", not_yet, 401, "TokenInvalid"),
        ("a token for another Pod", anothers, 403, "WrongAudience"),
    ],
)
async def test_tokens(
    tmp_path: Path, faults: Faults, name: str, attack: Attack, status: int, reason: str
) -> None:
    signer = Signer()
    signer.publish(tmp_path / "keys")
    executor = ParrotExecutor()
    with faults.row(f"{name} tells a replica to drain") as row:
        async with running(tmp_path, executor) as replica:
            executor.gate.clear()
            under_way = asyncio.create_task(replica.complete("abc", max_tokens=8))
            await replica.stepping()
            answer = await attack(replica, signer)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
            assert (await replica.state()).drain.phase is DrainPhase.SERVING
            row.strike()
            good = await send(replica, signer, "PUT", DRAIN_PATH, SERVE)
            assert good.status_code == 200
            executor.gate.set()
            assert (await under_way).status_code == 200
            assert (await replica.complete("abc")).status_code == 200
            row.recovered("nothing: all requests ended with 200", f"{status} {reason}")


async def test_limits_of_ten_times_the_capacity(tmp_path: Path, faults: Faults) -> None:
    signer = Signer()
    signer.publish(tmp_path / "keys")
    executor = ParrotExecutor(kv_blocks=24)
    with faults.row("a PUT of limits of 10 times the capacity") as row:
        async with running(tmp_path, executor) as replica:
            own = report(await send(replica, signer, "GET", LIMITS_PATH))
            tenfold = {name: 10 * getattr(own.applied, name) for name in PHYSICAL_FIELDS}
            wanted = own.applied.model_copy(update=tenfold)
            body: dict[str, Any] = {"limits": wanted.model_dump(mode="json")}
            answer = report(await send(replica, signer, "PUT", LIMITS_PATH, body))
            assert answer.applied == own.applied
            assert answer.clamped == PHYSICAL_FIELDS
            assert answer.requested_hash == wanted.content_hash
            row.strike()
            flood = [replica.complete("a" * 40, max_tokens=20) for _ in range(20)]
            statuses = {r.status_code for r in await asyncio.gather(*flood)}
            assert statuses <= {200, 429, 503}
            assert (await replica.complete("a" * 200, max_tokens=200)).status_code in (400, 413)
            state = await replica.until(lambda s: s.in_flight.requests == 0)
            assert state.occupancy is not None
            assert (state.occupancy.referenced_blocks, state.occupancy.capacity_blocks) == (0, 24)
            body = {"limits": own.applied.model_dump(mode="json")}
            assert report(await send(replica, signer, "PUT", LIMITS_PATH, body)).clamped == ()
            users = f"20 requests at once: {', '.join(map(str, sorted(statuses)))}"
            row.recovered(users, f"lowered and reported: {', '.join(PHYSICAL_FIELDS)}")


def report(answer: httpx.Response) -> LimitsReport:
    assert answer.status_code == 200, answer.text
    return LimitsReport.model_validate_json(answer.content)
