"""The wire: identity of limits by content, tolerance of unknown fields, binding of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol import tokens
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy
from kvscaler.protocol.refusals import CAPACITY_REASONS, STATUS_OF, RefusalReason
from kvscaler.protocol.state import ReplicaState, unreported
from pydantic import ValidationError

FIELDS = {
    "max_sequences": 8, "kv_blocks": 64, "step_tokens": 512, "queue_requests": 4,
    "queue_tokens": 100, "queue_bytes": 1000, "max_wait_seconds": 2.5,
    "max_request_tokens": 256, "watermark_blocks": 3,
}  # fmt: skip


def test_equal_content_is_equal_identity_whatever_its_way():
    limits = AdmissionLimits(**FIELDS)
    again = AdmissionLimits.model_validate_json(limits.model_dump_json())
    assert again == limits
    assert again.content_hash == limits.content_hash
    newer = AdmissionLimits.model_validate({**FIELDS, "from_the_future": 1})
    assert newer.content_hash == limits.content_hash


@given(st.sampled_from(sorted(FIELDS)), st.integers(1, 10))
def test_any_change_changes_the_identity(field, by):
    changed = AdmissionLimits(**(FIELDS | {field: FIELDS[field] + by}))
    assert changed.content_hash != AdmissionLimits(**FIELDS).content_hash


@pytest.mark.parametrize(
    "change", [{"kv_blocks": 0}, {"max_sequences": -1}, {"charge": "Free"}, {"queue_bytes": "x"}]
)
def test_nonsense_limits_are_refused(change):
    with pytest.raises(ValidationError):
        AdmissionLimits.model_validate(FIELDS | change)


def test_charge_is_expected_by_default():
    assert AdmissionLimits(**FIELDS).charge is ChargePolicy.EXPECTED


def test_every_refusal_has_a_status_and_capacity_ones_ask_to_wait():
    assert set(STATUS_OF) == set(RefusalReason)
    assert {STATUS_OF[r] for r in CAPACITY_REASONS} == {429, 503}


def test_each_admin_request_needs_one_right_and_others_do_not_exist():
    assert tokens.required_scope("PUT", tokens.LIMITS_PATH) is tokens.Scope.LIMITS_WRITE
    assert tokens.required_scope("GET", tokens.DRAIN_PATH) is tokens.Scope.DRAIN_READ
    assert tokens.required_scope("DELETE", tokens.LIMITS_PATH) is None
    assert tokens.required_scope("PUT", "/admin/v1/limits/") is None


@given(st.binary(), st.binary())
def test_body_hash_tells_bodies_apart(one, other):
    assert (tokens.body_hash(one) == tokens.body_hash(other)) == (one == other)


STATE = {
    "service_uid": "s", "service_name": "chat", "pod_uid": "p", "pod_name": "chat-1",
    "started_at": 1.0, "observed_at": 2.0, "ready": True,
    "executor": {"type": "Torch", "device": "cpu", "compute_dtype": "f", "kv_dtype": "f"},
    "model": {"uri": "u", "served_names": ["chat"], "digest": "d"},
    "occupancy": dict.fromkeys(
        ("capacity_blocks", "referenced_blocks", "reserved_blocks", "cached_blocks", "free_blocks",
         "running_requests", "waiting_requests", "waiting_tokens", "waiting_blocks"), 1),
}  # fmt: skip


def test_what_a_sender_says_in_full_is_all_reported():
    full = ReplicaState.model_validate(STATE | {"traffic": {}, "in_flight": {}})
    assert unreported(ReplicaState.model_validate_json(full.model_dump_json())) == ()


@pytest.mark.parametrize(
    ("part", "field", "path"),
    [
        ("traffic", "arrivals", "traffic.arrivals"),
        ("traffic", "queue_wait", "traffic.queue_wait"),
        ("in_flight", "generated_tokens", "in_flight.generated_tokens"),
        ("occupancy", "waiting_blocks", "occupancy.waiting_blocks"),
    ],
)
def test_a_number_that_was_not_sent_is_not_read_as_zero(part, field, path):
    sent = ReplicaState.model_validate(STATE).model_dump(mode="json")
    del sent[part][field]
    assert unreported(ReplicaState.model_validate(sent)) == (path,)
    del sent[part]
    if part != "occupancy":
        assert path in unreported(ReplicaState.model_validate(sent))


def test_a_histogram_without_its_sum_is_not_read_as_one_of_no_time():
    sent = ReplicaState.model_validate(STATE).model_dump(mode="json")
    del sent["traffic"]["queue_wait"]["sum_seconds"]
    assert unreported(ReplicaState.model_validate(sent)) == ("traffic.queue_wait.sum_seconds",)
