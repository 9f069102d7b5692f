"""What holds for every executor behind the seam, and that both use blocks exactly alike."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvscaler.budget import AdmissionPolicy, Footprint, admission_limits
from kvscaler.engine.replica import ReplicaEngine
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, Outcome, StepPlan
from kvscaler.performance import LLAMA_3_1_8B_H100
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy
from kvscaler.protocol.state import OccupancyReport, TrafficCounters
from kvscaler_sidecar.executors.modelled import Modelled
from kvscaler_sidecar.executors.pace import Pace
from kvscaler_sidecar.executors.plan_check import ExecutorError
from kvscaler_sidecar.executors.seam import Executor, SamplingParams
from kvscaler_sidecar.executors.synthetic import SyntheticTokens

from tests.sidecar.test_executor import BLOCKS, executor_of, tiny_folder
from tests.sidecar.test_modelled import budget_on

BLOCK_TOKENS = 8
STEP_TOKENS = 64
CONTEXT_TOKENS = 256
VOCABULARY = 211

BUDGET = replace(
    budget_on(),
    blocks=BLOCKS,
    block_tokens=BLOCK_TOKENS,
    step_tokens=STEP_TOKENS,
    max_context_tokens=CONTEXT_TOKENS,
    max_sequences=8,
)


def torch_executor(folder: Path) -> Executor:
    return executor_of(tiny_folder(folder), step_tokens=STEP_TOKENS, block_tokens=BLOCK_TOKENS)


def modelled_executor(_: Path) -> Executor:
    pace = Pace(lambda: 0.0, lambda _: None)
    return Modelled(BUDGET, LLAMA_3_1_8B_H100, SyntheticTokens(VOCABULARY), pace=pace)


MAKERS: dict[str, Callable[[Path], Executor]] = {
    "Torch": torch_executor,
    "Modelled": modelled_executor,
}


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executor]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def executor(request: pytest.FixtureRequest, executors: dict[str, Executor]) -> Executor:
    return executors[request.param]


def request_of(name: str, prompt: int, blocks: int | None = None) -> EngineRequest:
    request = EngineRequest.from_prompt(name, [1] * prompt, 20, 0.0)
    request.block_table = list(range(-(-prompt // BLOCK_TOKENS) if blocks is None else blocks))
    return request


# Behind the seam


def test_it_says_which_executor_it_is(executors: dict[str, Executor]) -> None:
    assert {name: executor.report.type for name, executor in executors.items()} == {
        name: name for name in MAKERS
    }
    assert executors["Torch"].report.time_scale == 1.0


def test_a_token_comes_for_each_sampling_chunk_and_for_no_other(executor: Executor) -> None:
    requests = [request_of(f"r{n}", 10 + n) for n in range(3)]
    for request in requests:
        executor.add(request, SamplingParams(seed=3))
    chunks = [Chunk(r, 0, r.prompt_tokens, r is not requests[1]) for r in requests]
    assert len(executor.execute(StepPlan(tuple(chunks)))) == 2
    assert executor.execute(StepPlan()) == []
    for request in requests:
        executor.remove(request)
        executor.remove(request)  # unknown now, and ignored


def test_the_same_seed_gives_the_same_token(executor: Executor) -> None:
    tokens = []
    for _ in range(2):
        request = request_of("again", 12)
        executor.add(request, SamplingParams(seed=11))
        tokens += executor.execute(StepPlan((Chunk(request, 0, 12, True),)))
        executor.remove(request)
    assert tokens[0].token_id == tokens[1].token_id


@pytest.mark.parametrize(
    ("prompt", "blocks", "known", "words"),
    [
        (STEP_TOKENS + 1, None, True, "a step of 65 tokens exceeds the 64"),
        (CONTEXT_TOKENS + 1, None, True, "exceed the context of 256"),
        (20, 1, True, "no block for token 19"),
        (20, None, False, r"samples but is unknown here; call add\(\) first"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(
    executor: Executor, prompt: int, blocks: int | None, known: bool, words: str
) -> None:
    request = request_of("bad", prompt, blocks)
    if known:
        executor.add(request, SamplingParams())
    start = max(0, prompt - STEP_TOKENS) if prompt > CONTEXT_TOKENS else 0
    with pytest.raises(ExecutorError, match=words):
        executor.execute(StepPlan((Chunk(request, start, prompt - start, True),)))
    executor.remove(request)


# Under one scheduler


def limits() -> AdmissionLimits:
    policy = AdmissionPolicy(charge=ChargePolicy.PROMPT_ONLY, queue_requests=100)
    return admission_limits(BUDGET, policy, calibrated_blocks=48)


def steps_of(executor: Executor, seed: int) -> Iterator[tuple[object, ...]]:
    """A day of a crowded replica, step by step: what was computed, and every count of blocks.

    So few blocks that requests wait and are preempted. Outputs are of a length drawn beforehand.
    """
    rng = random.Random(seed)
    engine = ReplicaEngine(limits(), 48, BLOCK_TOKENS, Footprint(BLOCK_TOKENS).blocks)
    waiting = []
    for number in range(40):
        prompt = [rng.randrange(100) for _ in range(rng.randint(4, 90))]
        if number % 5 == 0:
            prompt = [7] * 24 + prompt  # a shared beginning
        request = EngineRequest.from_prompt(f"r{number}", prompt, rng.randint(1, 60), 0.0)
        waiting.append((rng.randrange(150), request))
    now = 0
    while waiting or engine.busy:
        for at, request in [entry for entry in waiting if entry[0] <= now]:
            waiting.remove((at, request))
            offer = engine.offer(request, float(now))
            yield request.request_id, offer.admitted, offer.refusal is None
            executor.add(request, SamplingParams(seed=1))
        plan = engine.plan(float(now))
        tokens = executor.execute(plan)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        assert len(tokens) == len(sampling)
        outcomes = [Outcome(150 + index % 50) for index, _ in enumerate(sampling)]
        for request in engine.commit(plan, outcomes, float(now), 0.05):
            executor.remove(request)
        occupancy: OccupancyReport = engine.occupancy()
        yield (
            [(c.request.request_id, c.start, c.length, tuple(c.request.block_table))
             for c in plan.chunks],
            occupancy,
        )  # fmt: skip
        now += 1
    traffic: TrafficCounters = engine.traffic()
    assert traffic.preemptions > 0 and traffic.prefix_hit_tokens > 0
    assert engine.occupancy().referenced_blocks == 0
    yield (traffic.model_dump(exclude={"step_seconds"}),)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_used_exactly_alike(executors: dict[str, Executor], seed: int) -> None:
    real, modelled = (list(steps_of(executors[name], seed)) for name in ("Torch", "Modelled"))
    assert len(real) > 100
    assert modelled == real
