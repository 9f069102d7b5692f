"""What a sidecar can answer, and what the operator makes of it."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kvscaler.protocol import tokens
from kvscaler.protocol.drain import DrainPhase, DrainPut
from kvscaler.protocol.limits import LimitsPut
from kvscaler_operator.gateways.sidecar import Endpoint, Fault, SidecarError, SidecarGateway
from kvscaler_operator.keys import KeyFileError, SigningKey

from tests.controller.sidecars import OWN_LIMITS, FakeSidecar, make_state
from tests.controller.world import free_port

PRIVATE = Ed25519PrivateKey.generate()
KEY = SigningKey(PRIVATE, tokens.key_id(PRIVATE.public_key().public_bytes_raw()))


@pytest.fixture
async def sidecar() -> AsyncIterator[FakeSidecar]:
    fake = FakeSidecar("127.0.0.1", free_port(), free_port(), PRIVATE.public_key())
    fake.state = make_state("service-1", "pod-1", "chat-1")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway() -> AsyncIterator[SidecarGateway]:
    made = SidecarGateway(lambda: KEY, timeout_seconds=0.5)
    yield made
    await made.close()


def endpoint(sidecar: FakeSidecar, **changes: str) -> Endpoint:
    values = {"service_uid": "service-1", "pod_uid": "pod-1", "pod_name": "chat-1", **changes}
    return Endpoint(
        **values, ip=sidecar.ip, state_port=sidecar.state_port, admin_port=sidecar.admin_port
    )


async def fault_of(gateway: SidecarGateway, at: Endpoint) -> Fault:
    with pytest.raises(SidecarError) as raised:
        await gateway.state(at)
    return raised.value.fault


async def test_a_state_is_read(sidecar: FakeSidecar, gateway: SidecarGateway) -> None:
    state = await gateway.state(endpoint(sidecar))
    assert state.capacity is not None
    assert (state.pod_name, state.capacity.kv_blocks) == ("chat-1", 200)


async def test_a_hanging_sidecar_costs_its_time_limit_and_no_more(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    sidecar.hang = True
    begun = time.monotonic()
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.TIMEOUT
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("number", [b"1" + b"0" * 400, b"1e300", b"-1e31"])
async def test_a_number_beyond_all_measure_is_none(
    sidecar: FakeSidecar, gateway: SidecarGateway, number: bytes
) -> None:
    sidecar.raw = b'{"traffic": {"arrivals": ' + number + b"}}"
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.NOT_A_NUMBER


async def test_compressed_answers_are_not_unpacked(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    """A small answer must not become a large one before it is counted."""
    assert sidecar.state is not None
    sidecar.raw = gzip.compress(sidecar.state.model_dump_json().encode())
    sidecar.raw_headers = {"Content-Encoding": "gzip"}
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.MALFORMED


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", Fault.MALFORMED),
        (b"\xff\xfe garbage", Fault.MALFORMED),
        (b"[1, 2]", Fault.MALFORMED),
        (b'{"service_uid": 3}', Fault.MALFORMED),
        (b"[" * 60_000, Fault.MALFORMED),
        (b'"' + b"x" * 10_000_000 + b'"', Fault.TOO_LARGE),
    ],
)
async def test_garbage_is_no_state(
    sidecar: FakeSidecar, gateway: SidecarGateway, raw: bytes, fault: Fault
) -> None:
    sidecar.raw = raw
    assert await fault_of(gateway, endpoint(sidecar)) is fault


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e400"])
async def test_what_is_no_number_is_named_so(
    sidecar: FakeSidecar, gateway: SidecarGateway, number: str
) -> None:
    assert sidecar.state is not None
    text = sidecar.state.model_dump_json().replace('"step_seconds":0.0', f'"step_seconds":{number}')
    assert number in text
    sidecar.raw = text.encode()
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.NOT_A_NUMBER


async def test_a_redirect_is_not_followed(sidecar: FakeSidecar, gateway: SidecarGateway) -> None:
    sidecar.redirect = True
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.STATUS


async def test_an_answer_about_another_pod_is_refused(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    assert await fault_of(gateway, endpoint(sidecar, pod_uid="pod-2")) is Fault.MISMATCHED
    assert await fault_of(gateway, endpoint(sidecar, service_uid="other")) is Fault.MISMATCHED


async def test_nobody_there(gateway: SidecarGateway) -> None:
    nobody = Endpoint("s", "p", "n", "127.0.0.1", free_port(), free_port())
    assert await fault_of(gateway, nobody) is Fault.UNREACHABLE


async def test_unknown_fields_of_a_newer_sidecar_are_ignored(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    assert sidecar.state is not None
    newer = {**json.loads(sidecar.state.model_dump_json()), "version": 2, "news": {"a": 1}}
    sidecar.raw = json.dumps(newer).encode()
    assert (await gateway.state(endpoint(sidecar))).version == 2


async def test_limits_and_drain_carry_tokens_that_the_sidecar_verifies(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    wanted = OWN_LIMITS.model_copy(update={"queue_requests": 7})
    at = endpoint(sidecar)
    report = await gateway.put_limits(at, LimitsPut(if_hash=sidecar.limits.hash, limits=wanted))
    assert report.requested_hash == wanted.content_hash
    assert sidecar.limits_puts == [wanted]
    assert (await gateway.put_drain(at, DrainPut(drain=True))).phase is DrainPhase.DRAINING
    assert (await gateway.put_drain(at, DrainPut(drain=False))).phase is DrainPhase.SERVING


async def test_a_hash_that_moved_is_a_conflict(
    sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    with pytest.raises(SidecarError) as raised:
        await gateway.put_limits(
            endpoint(sidecar), LimitsPut(if_hash="0123456789abcdef", limits=OWN_LIMITS)
        )
    assert raised.value.fault is Fault.CONFLICT


async def test_without_a_key_nothing_is_sent(sidecar: FakeSidecar) -> None:
    def no_key() -> SigningKey:
        raise KeyFileError("no key")

    gateway = SidecarGateway(no_key)
    with pytest.raises(SidecarError) as raised:
        await gateway.put_drain(endpoint(sidecar), DrainPut(drain=True))
    assert raised.value.fault is Fault.NO_KEY
    assert sidecar.drain_puts == []
    await gateway.close()


async def test_concurrency_is_bounded(gateway: SidecarGateway, sidecar: FakeSidecar) -> None:
    bounded = SidecarGateway(lambda: KEY, concurrency=2, timeout_seconds=5)
    running, most = 0, 0
    real = sidecar._state

    async def slow(request: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await real(request)  # type: ignore[arg-type]

    await sidecar.stop()
    sidecar._state = slow  # type: ignore[method-assign, assignment]
    await sidecar.start()
    await asyncio.gather(*(bounded.state(endpoint(sidecar)) for _ in range(12)))
    assert most == 2
    await bounded.close()


@pytest.mark.parametrize("text", ["inf", "nan", "1e400", "12"])
async def test_a_text_is_no_number(
    text: str, sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    assert sidecar.state is not None
    body = json.loads(sidecar.state.model_dump_json())
    body["traffic"]["step_seconds"] = text
    sidecar.raw = json.dumps(body).encode()
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.MALFORMED


@pytest.mark.parametrize("number", ["2" + "0" * 30, "-" + "9" * 400, "1.5E+31", "1" * 31 + ".5"])
async def test_a_number_that_overflows_arithmetic_is_none(
    number: str, sidecar: FakeSidecar, gateway: SidecarGateway
) -> None:
    assert sidecar.state is not None
    body = sidecar.state.model_dump_json()
    sidecar.raw = body.replace('"step_seconds":0.0', f'"step_seconds":{number}').encode()
    assert sidecar.raw != body.encode()
    assert await fault_of(gateway, endpoint(sidecar)) is Fault.NOT_A_NUMBER
