"""Conditions move only when there is something to say."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler_api.conditions import (
    MAX_MESSAGE_LENGTH,
    Condition,
    ConditionStatus,
    ConditionType,
    find_condition,
    initial_conditions,
    set_condition,
)
from kvscaler_api.reasons import EventReason, Reason

START = datetime(2026, 1, 1, tzinfo=UTC)
LATER = START + timedelta(minutes=5)


def ready(conditions: Any, status: Any, message: str = "", now: datetime = LATER) -> Any:
    return set_condition(
        conditions, ConditionType.READY, status, Reason.ROLLING_OUT, message, generation=2, now=now
    )


def test_all_types_are_there_from_first_sight_in_order() -> None:
    conditions = initial_conditions((), generation=1, now=START)
    assert [c.type for c in conditions] == [
        "Ready",
        "SpecValid",
        "BudgetFits",
        "SignalsFresh",
        "ScalingActive",
        "LimitsApplied",
        "ReplicasOwned",
    ]
    assert {(c.status, c.reason) for c in conditions} == {("Unknown", "Progressing")}
    assert initial_conditions(conditions, generation=9, now=LATER) == conditions


def test_transition_time_moves_only_with_the_status() -> None:
    conditions = ready((), False, "a", START)
    conditions = ready(conditions, False, "b", LATER)
    (condition,) = conditions
    assert condition.last_transition_time == START
    assert (condition.message, condition.observed_generation) == ("b", 2)
    (condition,) = ready(conditions, True, "b", LATER)
    assert condition.last_transition_time == LATER


def test_an_equal_condition_is_no_change() -> None:
    once = ready((), None, "a", START)
    assert ready(once, None, "a", LATER) == once
    assert once[0].status is ConditionStatus.UNKNOWN


def test_conditions_of_others_are_kept_and_messages_are_cut() -> None:
    foreign = Condition(
        type="AAA", status=ConditionStatus.TRUE, last_transition_time=START, reason="Theirs"
    )
    conditions = ready((foreign,), True, "x" * (MAX_MESSAGE_LENGTH + 1))
    assert [c.type for c in conditions] == ["Ready", "AAA"]
    assert len(conditions[0].message) == MAX_MESSAGE_LENGTH
    assert find_condition(conditions, ConditionType.READY) == conditions[0]
    assert find_condition(conditions, ConditionType.BUDGET_FITS) is None


@given(st.lists(st.tuples(st.sampled_from(ConditionType), st.booleans()), max_size=20))
def test_each_type_occurs_once_with_its_last_status(
    updates: list[tuple[ConditionType, bool]],
) -> None:
    conditions: tuple[Condition, ...] = ()
    for type_, status in updates:
        conditions = set_condition(
            conditions, type_, status, Reason.PROGRESSING, "", generation=1, now=START
        )
    assert {c.type: c.status == "True" for c in conditions} == dict(updates)


@pytest.mark.parametrize("reason", [*Reason, *EventReason])
def test_reasons_are_camel_case_words(reason: str) -> None:
    assert reason.isalnum()
    assert reason[0].isupper()
