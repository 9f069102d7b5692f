"""The wire: identity of limits by content, tolerance of unknown fields, binding of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol import tokens
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy
from kvscaler.protocol.refusals import CAPACITY_REASONS, STATUS_OF, RefusalReason
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
