"""Executor `Modelled`: the time of a card, the blocks of its memory, and text by a seed."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler import hardware
from kvscaler.budget import EngineSettings, KVBudget, compute_budget, profile_for
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, StepPlan
from kvscaler.models import catalogue
from kvscaler.performance import LLAMA_3_1_8B_H100, StepTimeModel
from kvscaler_sidecar.config import ConfigurationError, Settings, load
from kvscaler_sidecar.executors.modelled import Modelled
from kvscaler_sidecar.executors.pace import MAX_BEHIND_SECONDS, Pace
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.executors.synthetic import (
    SYLLABLES,
    SyntheticTokenizer,
    SyntheticTokens,
    unsupported_field,
)
from kvscaler_sidecar.modelled_loader import ModelledLoader
from kvscaler_sidecar.start import StartRefused, plan_start

from tests.sidecar.replicas import running

LLAMA = "hf://meta-llama/Llama-3.1-8B-Instruct"
H100 = "nvidia-h100-80gb-hbm3"
H100_BYTES = hardware.find(H100).memory_bytes
assert H100_BYTES is not None
OPTIONS = {
    "accelerator": H100,
    "memory_bytes": str(H100_BYTES),
    "model_uri": LLAMA,
    "served_names": "llama",
    "max_context_tokens": "8192",
    "block_tokens": "16",
}
VOCABULARY = 1000


class Clock:
    """Time that passes only in sleeps, each of which ends late by what is drawn for it."""

    def __init__(self, late: Sequence[float] = ()) -> None:
        self.now = 100.0
        self.late = list(late)
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + (self.late.pop() if self.late else 0.0)


def paced(clock: Clock) -> Pace:
    return Pace(clock, clock.sleep)


# The clock


@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=200), st.floats(0.03, 0.2))
def test_late_wake_ups_do_not_add_up(late: list[float], seconds: float) -> None:
    clock = Clock(late)
    pace = paced(clock)
    begin, last = clock.now, late[0]
    for _ in late:
        pace.step(seconds)
    assert clock.now - begin == pytest.approx(seconds * len(late) + last)


@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=50))
def test_work_between_two_steps_is_part_of_their_time(between: list[float]) -> None:
    clock = Clock()
    pace = paced(clock)
    pace.step(0.05)
    begin = clock.now
    for seconds in between:
        clock.now += seconds
        pace.step(0.05)
    assert clock.now - begin == pytest.approx(0.05 * len(between))


def test_a_step_after_a_rest_begins_when_it_is_asked_for() -> None:
    clock = Clock()
    pace = paced(clock)
    pace.step(0.05)
    pace.rest()
    clock.now += 0.03
    pace.step(0.05)
    assert clock.slept == [pytest.approx(0.05)] * 2


def test_a_process_that_stood_still_does_not_rush_through_what_it_missed() -> None:
    clock = Clock()
    pace = paced(clock)
    pace.step(0.1)
    clock.now += 60.0
    begin = clock.now
    for _ in range(100):
        pace.step(0.1)
    assert clock.now - begin == pytest.approx(100 * 0.1 - MAX_BEHIND_SECONDS)


# Steps


def budget_on(card: str = "h100", context: int = 8192) -> KVBudget:
    accelerator = hardware.find(card)
    assert accelerator.memory_bytes is not None
    accelerator = accelerator.with_memory(accelerator.memory_bytes)  # as a replica is told it
    return compute_budget(
        catalogue.find(LLAMA).architecture,
        accelerator,
        profile_for("Kvscaler", accelerator),
        EngineSettings(memory_utilization_percent=90, max_context_tokens=context),
    )


def request_of(prompt: int, generated: int = 0) -> EngineRequest:
    request = EngineRequest.from_prompt(f"r{prompt}", [1] * prompt, 100, 0.0)
    request.token_ids += [2] * generated
    request.block_table = list(range(-(-(prompt + generated) // 16)))
    return request


def mixed_plan(executor: Modelled) -> StepPlan:
    """Three decodes and a part of a prompt."""
    decoding = [request_of(100, 5), request_of(300, 9), request_of(50, 1)]
    prefilling = request_of(2000)
    for request in (*decoding, prefilling):
        executor.add(request, SamplingParams(seed=1))
    chunks = [Chunk(r, len(r.token_ids) - 1, 1, True) for r in decoding]
    return StepPlan((*chunks, Chunk(prefilling, 512, 1024, False)))


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5])
def test_a_step_takes_the_cards_time_stretched(scale: float) -> None:
    clock = Clock()
    executor = Modelled(
        budget_on(), LLAMA_3_1_8B_H100, SyntheticTokens(VOCABULARY),
        time_scale=scale, pace=paced(clock),
    )  # fmt: skip
    tokens = executor.execute(mixed_plan(executor))
    pairs = 1024 * 512 + 1024 * 1025 // 2
    card = LLAMA_3_1_8B_H100.step_seconds(3, 105 + 309 + 51, 1024, pairs)
    assert clock.slept == [pytest.approx(scale * card)]
    assert len(tokens) == 3
    assert StepTimeModel.from_costs(executor.measure()).step_seconds(
        3, 465, 1024, pairs
    ) == pytest.approx(scale * card)
    assert executor.report.time_scale == scale


def test_the_clock_rests_when_the_last_request_is_gone() -> None:
    clock = Clock()
    executor = Modelled(
        budget_on(), LLAMA_3_1_8B_H100, SyntheticTokens(VOCABULARY), pace=paced(clock)
    )
    plan = mixed_plan(executor)
    executor.execute(plan)
    for chunk in plan.chunks:
        executor.remove(chunk.request)
    clock.now += 5.0
    executor.execute(mixed_plan(executor))
    assert clock.slept[1] == pytest.approx(clock.slept[0])


# Text


def test_the_same_seed_gives_the_same_tokens_and_recomputing_changes_none() -> None:
    def run(seed: int | None, length: int = 30, temperature: float = 1.0) -> list[int]:
        tokens, request = SyntheticTokens(VOCABULARY), request_of(5)
        tokens.add(request, SamplingParams(seed=seed, temperature=temperature))
        for _ in range(length):
            request.token_ids.append(tokens.next(request).token_id)
        return request.token_ids[5:]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)
    assert run(None, temperature=0.0) == run(None, temperature=0.0)
    assert set(run(7, 2000)) == set(range(len(SYLLABLES)))


def test_output_ends_by_max_tokens_alone_or_by_a_stated_mean() -> None:
    def length(mean: int, seed: int) -> int:
        tokens, request = SyntheticTokens(VOCABULARY, mean), request_of(5)
        tokens.add(request, SamplingParams(seed=seed))
        while request.generated_tokens < 2000:
            request.token_ids.append(tokens.next(request).token_id)
            if request.token_ids[-1] == VOCABULARY - 1:
                break
        return request.generated_tokens

    assert length(0, 1) == 2000
    lengths = [length(50, seed) for seed in range(400)]
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(50, rel=0.15)  # three standard errors of a geometric mean
    assert len(set(lengths)) > 50


@given(st.text(max_size=200))
def test_one_token_stands_for_four_bytes(text: str) -> None:
    tokenizer = SyntheticTokenizer(128_256)
    ids = tokenizer.encode(text)
    assert len(ids) == tokenizer.least_tokens(text) == -(-len(text.encode()) // 4)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


def test_texts_that_begin_alike_have_token_ids_that_begin_alike() -> None:
    tokenizer = SyntheticTokenizer(128_256)
    one, two = tokenizer.encode("a common beginning, then A"), tokenizer.encode(
        "a common beginning, then B"
    )  # fmt: skip
    assert one[:6] == two[:6]
    assert one != two


def test_a_vocabulary_without_room_for_the_syllables_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        SyntheticTokenizer(50)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=0.3, seed=4), None),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(top_p=0.9), "top_p"),
        (SamplingParams(top_k=5), "top_k"),
        (SamplingParams(presence_penalty=0.1), "presence_penalty"),
        (SamplingParams(frequency_penalty=-0.1), "frequency_penalty"),
    ],
)
def test_what_needs_probabilities_is_named(params: SamplingParams, field: str | None) -> None:
    assert unsupported_field(params) == field


# A replica


def modelled_settings(**changes: str) -> Settings:
    return load({**OPTIONS, "executor": "Modelled", **changes}, {})


def loaded(settings: Settings, clock: Clock) -> Any:
    loader = ModelledLoader(clock.now, clock, clock.sleep)
    return loader(settings, plan_start(settings, loader.compute_dtype))


def test_the_pool_is_the_cards_and_not_the_pods() -> None:
    settings = modelled_settings()
    plan = plan_start(settings, settings.compute_dtype, memory_limit_bytes=128 << 20)
    made = loaded(settings, Clock())
    assert plan.budget == budget_on()
    assert made.executor.kv_blocks == plan.budget.blocks > 28_000
    assert (made.executor.pool_bytes, made.executor.weight_bytes) == (0, 0)
    assert made.step_costs == LLAMA_3_1_8B_H100.costs()


def test_the_cold_start_is_stretched_and_counts_from_the_process() -> None:
    clock = Clock()
    settings = modelled_settings(time_scale="3", modelled_start_seconds="20")
    loader = ModelledLoader(clock.now - 4.0, clock, clock.sleep)
    loader(settings, plan_start(settings, loader.compute_dtype))
    assert clock.slept == [pytest.approx(60.0 - 4.0)]


def test_a_card_or_model_that_nothing_is_known_of_is_refused() -> None:
    with pytest.raises(StartRefused, match=r"Modelled: accelerator cpu has no stated memory band"):
        loaded(modelled_settings(accelerator="cpu"), Clock())
    with pytest.raises(StartRefused, match=r"executor Modelled knows nothing about the model"):
        plan_start(modelled_settings(model_uri="hf://some/model"), "Auto")


def test_a_folder_with_a_config_does_without_the_catalogue(tmp_path: Path) -> None:
    facts = {**catalogue.find(LLAMA).architecture.facts, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    plan = plan_start(modelled_settings(model_uri=str(tmp_path)), "Auto")
    assert plan.architecture.layers == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "Modeled"}, r"--executor='Modeled'.*no such executor; use Torch or Modelled"),
        ({"time_scale": "-2"}, r"--time-scale='-2'.*above 0, at most 1000"),
        ({"time_scale": "0"}, "above 0"),
        ({"time_scale": "nan"}, "above 0"),
        ({"time_scale": "fast"}, "--time-scale='fast'"),
        ({"executor": "Torch", "time_scale": "2"}, r"--time-scale goes with the executor Modelled"),
        ({"executor": "Torch", "modelled_start_seconds": "2"}, "goes with the executor Modelled"),
    ],
)
def test_bad_names_and_scales_are_refused_in_words(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        modelled_settings(**options)


def test_options_come_by_variables_too() -> None:
    variables = {f"KVSCALER_{name.upper()}": value for name, value in OPTIONS.items()}
    modelled = {"KVSCALER_EXECUTOR": "Modelled", "KVSCALER_TIME_SCALE": "2.5"}
    settings = load({}, {**variables, **modelled})
    assert (settings.executor, settings.time_scale) == ("Modelled", 2.5)


def test_a_modelled_replica_never_loads_torch() -> None:
    program = (
        "import sys\n"
        "import kvscaler_sidecar.main, kvscaler_sidecar.modelled_loader\n"
        "import kvscaler_sidecar.replica, kvscaler_sidecar.server.listeners\n"
        "sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_it_is_shown_wherever_the_executor_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ModelledLoader(0.0)
    with caplog.at_level("INFO"):
        async with running(
            tmp_path, kind="Modelled", loader=loader, **{**OPTIONS, "time_scale": "0.25"}
        ) as replica:
            state, page = await replica.state(), await replica.metrics()
            models = (await replica.client.get(replica.url("http", "/v1/models"))).json()
    assert (state.executor.type, state.executor.time_scale) == ("Modelled", 0.25)
    assert state.executor.device == H100
    assert "H100" in state.executor.reason
    assert state.capacity is not None
    assert state.capacity.kv_blocks == state.capacity.predicted_kv_blocks == budget_on().blocks
    assert (state.capacity.pool_bytes, state.capacity.weight_bytes) == (0, 0)
    assert state.step_costs == LLAMA_3_1_8B_H100.costs(0.25)
    info = next(line for line in page.splitlines() if line.startswith("kvscaler_executor_info"))
    assert 'type="Modelled"' in info and 'time_scale="0.25"' in info
    assert (models["data"][0]["executor"], models["data"][0]["time_scale"]) == ("Modelled", 0.25)
    ready = next(SimpleNamespace(**r.__dict__) for r in caplog.records if r.message == "ready")
    assert (ready.executor, ready.time_scale, ready.device) == ("Modelled", 0.25, H100)


async def test_a_starting_replica_says_what_it_will_be(tmp_path: Path) -> None:
    options = {**OPTIONS, "time_scale": "4", "modelled_start_seconds": "300"}
    loader = ModelledLoader(ModelledLoader(0.0).clock())
    async with running(
        tmp_path, kind="Modelled", loader=loader, wait_ready=False, **options
    ) as replica:
        state = await replica.state()
    assert not state.ready
    assert (state.executor.type, state.executor.time_scale) == ("Modelled", 4.0)


async def test_it_serves_streams_and_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    options = {**OPTIONS, "time_scale": "0.01"}
    async with running(tmp_path, kind="Modelled", loader=ModelledLoader(0.0), **options) as replica:

        async def complete(**fields: Any) -> Any:
            body = {"model": "llama", "prompt": "a" * 400, "max_tokens": 12, **fields}
            return await replica.post("/v1/completions", body)

        first, again = await complete(seed=5), await complete(seed=5)
        assert first.json()["choices"][0]["text"] == again.json()["choices"][0]["text"]
        assert first.json()["choices"][0]["finish_reason"] == "length"
        usage = first.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, 12)
        stream = (await complete(stream=True, seed=5)).text
        assert stream.count("data: ") >= 13 and stream.rstrip().endswith("[DONE]")
        for field, value in (("logprobs", 2), ("top_p", 0.5), ("presence_penalty", 1.0)):
            answer = await complete(**{field: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert f"takes no {field}" in error["message"]
        chat = await replica.post(
            "/v1/chat/completions",
            {"model": "llama", "messages": [{"role": "user", "content": "hello"}],
             "max_tokens": 3},
        )  # fmt: skip
        assert chat.json()["usage"]["completion_tokens"] == 3
        long = await complete(prompt="a" * 4 * 9000)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "context_length_exceeded")
