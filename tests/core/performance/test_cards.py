"""Step times of named cards: the fits as they were measured, and a roofline that is near them."""

from dataclasses import replace

import pytest
from kvscaler import hardware
from kvscaler.models import ModelArchitecture, catalogue
from kvscaler.performance import LLAMA_3_1_8B_H100, StepTimeModel, StepTimeUnknown, step_time_on
from kvscaler.performance.cards import LLAMA_3_1_8B_L40S, roofline

BF16 = "bfloat16"


def llama() -> ModelArchitecture:
    return catalogue.find("llama-3.1-8b").architecture


def constants(model: StepTimeModel) -> dict[str, float]:
    return {
        "base": model.base_seconds,
        "context": model.per_context_token_seconds,
        "prefill": model.per_prefill_token_seconds,
        "pair": model.pair_seconds,
        "sequence": model.per_sequence_seconds,
    }


@pytest.mark.parametrize(
    ("card", "fit"), [("h100", LLAMA_3_1_8B_H100), ("l40s", LLAMA_3_1_8B_L40S)]
)
def test_a_measured_pair_has_its_fit(card: str, fit: StepTimeModel) -> None:
    assert step_time_on(llama(), hardware.find(card), BF16, BF16) is fit


def test_the_roofline_gives_the_fit_that_its_shares_come_from() -> None:
    derived = constants(roofline(llama(), hardware.find("h100"), BF16, BF16))
    for name, value in constants(LLAMA_3_1_8B_H100).items():
        assert derived[name] == pytest.approx(value, rel=0.005), name


def test_the_roofline_is_near_the_other_fits() -> None:
    """The L40S fit, and the constants that reproduced a real vLLM run on an RTX 4090."""
    others = {
        "l40s": constants(LLAMA_3_1_8B_L40S),
        "4090": {"base": 16.8e-3, "context": 137e-9, "prefill": 105e-6},
    }
    for card, measured in others.items():
        derived = constants(roofline(llama(), hardware.find(card), BF16, BF16))
        for name in ("base", "context", "prefill"):
            assert derived[name] == pytest.approx(measured[name], rel=0.2), (card, name)


def test_another_number_format_is_no_longer_the_measured_pair() -> None:
    h100 = hardware.find("h100")
    halved = step_time_on(llama(), h100, BF16, "fp8_e4m3")
    assert halved.per_context_token_seconds == pytest.approx(
        LLAMA_3_1_8B_H100.per_context_token_seconds / 2, rel=0.005
    )
    assert halved.base_seconds == pytest.approx(LLAMA_3_1_8B_H100.base_seconds, rel=0.005)


def test_another_model_of_the_same_name_is_not_the_measured_pair() -> None:
    facts = {**llama().facts, "num_hidden_layers": 16}
    half = step_time_on(ModelArchitecture.from_config(facts), hardware.find("h100"), BF16, BF16)
    assert half.per_context_token_seconds == pytest.approx(
        LLAMA_3_1_8B_H100.per_context_token_seconds / 2, rel=0.005
    )


def test_a_model_whose_steps_are_made_otherwise_has_no_step_times() -> None:
    for changes in ({"experts_per_token": 2}, {"groups": llama().groups * 2}):
        with pytest.raises(StepTimeUnknown, match="take a dense model"):
            roofline(replace(llama(), **changes), hardware.find("h100"), BF16, BF16)


def test_a_device_without_rates_has_no_step_times() -> None:
    with pytest.raises(StepTimeUnknown, match=r"cpu has no stated memory bandwidth.*name a card"):
        step_time_on(llama(), hardware.find("cpu"), BF16, BF16)
    with pytest.raises(StepTimeUnknown, match=r"no stated FLOP rate in float32"):
        step_time_on(llama(), hardware.find("h100"), "float32", "float32")
    slow = replace(hardware.find("h100"), flops_per_second={})
    with pytest.raises(StepTimeUnknown, match=r"FLOP rate in bfloat16"):
        roofline(llama(), slow, BF16, BF16)
