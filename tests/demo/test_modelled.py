"""The fleet demo's rates follow from the model, and a run that was not true to it fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.demo.modelled import (
    Card,
    ClientLag,
    NotModelledError,
    card_of,
    check_model,
    chunks_per_second,
    modelled_speed,
    work_of,
)
from hack.demo.observe import PodSample, Sample
from hack.demo.profile import FLEET
from hack.demo.report import Phase
from hack.demo.traffic import Request, Result, make_prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = yaml.safe_load((EXAMPLES / FLEET.example).read_text())
SPIKE = Phase("spike", 0.0, 100.0, 4.0)


def card() -> Card:
    return card_of(EXAMPLE)


def test_the_card_is_an_h100_at_the_examples_time_scale():
    found = card()
    assert found.time_scale == 2.0
    assert found.blocks > 28_000
    assert found.model.base_seconds == pytest.approx(2 * 6.342e-3)


def test_a_service_that_is_not_modelled_has_no_modelled_speed():
    real = yaml.safe_load((EXAMPLES / "smollm2.yaml").read_text())
    with pytest.raises(NotModelledError, match="executor Torch"):
        card_of(real)
    unknown = {**EXAMPLE, "spec": {**EXAMPLE["spec"], "accelerator": {"name": "nvidia-none"}}}
    with pytest.raises(NotModelledError, match="nvidia-none"):
        card_of(unknown)


def test_at_the_full_rate_the_blocks_are_full_and_compute_is_not():
    found, shape = card(), FLEET.shape
    speed, work = modelled_speed(found, shape), work_of(FLEET.shape)
    held = speed["requests_per_second"] * found.model.kv_token_seconds(work, speed["utilization"])
    assert held == pytest.approx(found.usable_blocks * found.block_tokens, rel=1e-6)
    assert speed["utilization"] < 0.9, "memory must bind, not compute"


def test_a_time_scale_stretches_times_and_thins_rates_alike():
    one, four = (
        modelled_speed(replace(card(), model=replace_scale(factor)), FLEET.shape)
        for factor in (1, 4)
    )
    assert one["requests_per_second"] == pytest.approx(4 * four["requests_per_second"])
    assert 4 * one["request_seconds"] == pytest.approx(four["request_seconds"])
    assert one["utilization"] == pytest.approx(four["utilization"])


def replace_scale(factor: float) -> Any:
    model = card().model
    return type(model).from_costs(model.costs(factor), "test")


def test_prompts_have_the_tokens_that_the_rates_are_computed_for():
    import random

    rng = random.Random(1)
    lengths = [
        len(make_prompt(rng, rng.randint(*FLEET.shape.prompt_words))) / 4 for _ in range(200)
    ]
    assert sum(lengths) / len(lengths) == pytest.approx(
        work_of(FLEET.shape).prompt_mean_tokens, rel=0.03
    )


def test_the_whole_fleet_emits_no_more_chunks_than_it_may():
    speed = modelled_speed(card(), FLEET.shape)
    most = EXAMPLE["spec"]["scaling"]["maxReplicas"] * speed["output_tokens_per_second"]
    assert FLEET.most_chunks_per_second is not None
    assert most <= FLEET.most_chunks_per_second
    assert FLEET.spike_share == 10 * FLEET.calm_share


# The verdict


def pod(pace: float = 1.0, kind: str = "Modelled", scale: float = 2.0) -> PodSample:
    state = {
        "ready": True,
        "executor": {"type": kind, "time_scale": scale},
        "capacity": {"kv_blocks": card().blocks},
        "step_costs": {"base_seconds": pace * card().model.base_seconds},
        "traffic": {"steps": 10},
    }
    return PodSample("a", "a", "10.0.0.1", True, False, 0, "", None, None, state)


def request(gap: float) -> Request:
    made = Request("spike", 1.0, 30, 16)
    made.result, made.first_token_seconds = Result.OK, 1.0
    made.token_gaps_seconds = [gap] * 100
    return made


def failed(pods=None, requests=None, lag=0.01, status="Modelled"):
    service = {"status": {"executor": {"type": status}}}
    samples = [Sample(50.0, service, pods or [pod()])]
    checks = check_model(
        samples, requests or [request(0.1)], SPIKE, card(), ClientLag([lag] * 10), 50.0
    )
    return [check.name for check in checks if not check.holds]


def test_a_run_that_is_true_to_the_model_passes():
    assert failed() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pods": [pod(), pod(kind="Torch")]}, "every replica was Modelled"),
        ({"pods": [pod(), pod(scale=1.0)]}, "every replica was Modelled"),
        ({"status": None}, "every replica was Modelled"),
        ({"pods": [pod(1.3)]}, "nine looks in ten"),
        ({"requests": [request(0.01)] * 10}, "the fleet emitted"),
        ({"requests": [Request("spike", 1.0, 30, 16)]}, "the fleet emitted"),
        ({"lag": 2.0}, "the client's event loop"),
    ],
)
def test_each_check_fails_on_its_own_condition(changes, words):
    (name,) = failed(**changes)
    assert name.startswith(words)


def test_chunks_are_counted_when_they_come():
    steady = [request(0.1)] * 3  # 30 a second from second 2 on
    assert chunks_per_second(steady) == pytest.approx(30, rel=0.05)
    assert chunks_per_second([]) == 0
