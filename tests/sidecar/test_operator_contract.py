"""The operator's own client against a live replica: both sides of one protocol in one test."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from kvscaler.protocol import metrics as names
from kvscaler.protocol.drain import DrainPhase, DrainPut
from kvscaler.protocol.limits import LimitsPut
from kvscaler.protocol.metrics import STATE_METRICS, MetricKind
from kvscaler.traffic import Present
from kvscaler_operator.gateways.prometheus import SCRAPE_TIME, Series
from kvscaler_operator.gateways.sidecar import Endpoint, Fault, SidecarError, SidecarGateway
from kvscaler_operator.keys import SigningKey
from kvscaler_operator.scraped import replica_state
from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar.replicas import Running, running, state_and_metrics_under_load


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    made = SigningKey.from_pem(pem, "a test")
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / f"{made.key_id}.pem").write_text(made.public_pem)
    return made


def endpoint(replica: Running, pod_uid: str = "pod-1") -> Endpoint:
    return Endpoint(
        service_uid="service-1",
        pod_uid=pod_uid,
        pod_name="chat-abc",
        ip="127.0.0.1",
        state_port=replica.ports["metrics"],
        admin_port=replica.ports["admin"],
    )


async def test_state_limits_and_drain(tmp_path: Path, key: SigningKey) -> None:
    async with running(tmp_path) as replica:
        gateway = SidecarGateway(lambda: key, timeout_seconds=20)
        try:
            here = endpoint(replica)
            state = await gateway.state(here)
            assert state.limits is not None
            tight = state.limits.applied.model_copy(update={"kv_blocks": 10})
            report = await gateway.put_limits(
                here, LimitsPut(if_hash=state.limits.hash, limits=tight)
            )
            assert report.requested_hash == tight.content_hash
            with pytest.raises(SidecarError) as conflict:
                await gateway.put_limits(here, LimitsPut(if_hash=state.limits.hash, limits=tight))
            assert conflict.value.fault is Fault.CONFLICT
            drained = await gateway.put_drain(here, DrainPut(drain=True))
            assert drained.phase is DrainPhase.EMPTY
            assert (await gateway.state(here)).drain.reason == "admin"
            assert (await gateway.put_drain(here, DrainPut(drain=False))).phase is (
                DrainPhase.SERVING
            )
            with pytest.raises(SidecarError) as wrong_pod:
                await gateway.put_drain(endpoint(replica, "pod-2"), DrainPut(drain=True))
            assert wrong_pod.value.fault is Fault.STATUS
            assert "WrongAudience" in str(wrong_pod.value)
        finally:
            await gateway.close()


LABELLED = {
    names.KV_BLOCKS: "blocks",
    names.REQUESTS_REFUSED: "refused",
    names.DRAIN_PHASE: "drain",
    names.EXECUTOR_INFO: "executor",
    names.MODEL_INFO: "model",
    names.LIMITS_INFO: "limits",
}


def scraped(text: str) -> list[Series]:
    """What the operator's queries would give for this page."""
    kinds = {metric.name: metric.kind for metric in STATE_METRICS}
    series = [Series(SCRAPE_TIME, {}, "1000")]
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == names.DRAIN_PHASE and sample.value == 0:
                continue
            query = LABELLED.get(sample.name, "numbers")
            if kinds.get(family.name) is MetricKind.HISTOGRAM:
                query = {"_bucket": "buckets", "_sum": "sums"}.get(
                    sample.name.removeprefix(family.name), "numbers"
                )
            series.append(
                Series(query, {**sample.labels, "__name__": sample.name}, str(sample.value))
            )
    return series


async def test_prometheus_gives_the_operator_the_same_state(tmp_path: Path) -> None:
    direct, page = await state_and_metrics_under_load(tmp_path)
    seen = replica_state(
        scraped(page),
        service_uid="service-1",
        service_name="chat",
        pod_uid="pod-1",
        pod_name="chat-abc",
    )
    assert isinstance(seen, Present), seen
    state = seen.value
    assert state.occupancy == direct.occupancy
    assert state.capacity == direct.capacity
    assert state.traffic == direct.traffic
    assert state.in_flight == direct.in_flight
    assert state.started_at == direct.started_at
    assert state.ready == direct.ready
    assert state.drain.phase == direct.drain.phase
    assert state.limits is not None and direct.limits is not None
    assert state.limits.applied == direct.limits.applied
    assert state.limits.hash == direct.limits.hash
    assert state.executor.type == "Parrot"
