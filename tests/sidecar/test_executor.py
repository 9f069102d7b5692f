"""Executor Torch against transformers: same tokens, same logits, whatever the blocks look like."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kvscaler.budget import ResolvedSettings
from kvscaler.budget.profiles import own
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import BlockCopy, Chunk, StepPlan
from kvscaler_sidecar.executors.dtype import ComputeDtype
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.executors.torch_cpu import Torch, TorchSettings
from kvscaler_sidecar.tokenizer import HuggingFaceTokenizer
from kvscaler_sidecar.weights import builtin
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)  # tests share the machine: threads would wait for each other

FP32 = ComputeDtype(torch.float32, "test")
BF16 = ComputeDtype(torch.bfloat16, "test")
GREEDY = SamplingParams(temperature=0.0)
BLOCK_TOKENS = 8
CHUNK_TOKENS = 24
BLOCKS = 120


def executor_of(
    folder: Path, compute: ComputeDtype = FP32, step_tokens: int = 256, block_tokens: int = 8
) -> Torch:
    settings = TorchSettings(
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        max_sequences=8,
        max_context_tokens=256,
        compute=compute,
    )
    executor = Torch.load(folder, settings)
    executor.allocate(BLOCKS)
    return executor


def tiny_folder(folder: Path, **changes: object) -> Path:
    """A random model with head dims, depths and widths unlike SmolLM2's, and untied embeddings."""
    torch.manual_seed(7)
    fields: dict[str, object] = {
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # random, so that a norm left out shows
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' fp32 logits of every position, `[tokens, vocabulary]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def requests_of(
    prompts: Sequence[Sequence[int]], new_tokens: int, block_tokens: int, seed: int = 0
) -> list[EngineRequest]:
    """Requests with all the blocks that they will need, in a shuffled pool."""
    free = list(range(BLOCKS))
    random.Random(seed).shuffle(free)
    requests = []
    for number, prompt in enumerate(prompts):
        request = EngineRequest.from_prompt(f"r{number}", prompt, new_tokens, 0.0)
        needed = -(-(len(prompt) + new_tokens) // block_tokens)
        request.block_table = [free.pop() for _ in range(needed)]
        requests.append(request)
    return requests


def generate(executor: Torch, requests: Sequence[EngineRequest], chunk_tokens: int) -> None:
    """Run all requests to their ends, prefill in chunks beside the others' decode steps."""
    for request in requests:
        executor.add(request, GREEDY)
    while any(r.generated_tokens < r.max_new_tokens for r in requests):
        chunks = []
        for request in requests:
            if request.generated_tokens < request.max_new_tokens:
                length = min(chunk_tokens, request.uncomputed_tokens)
                last = length == request.uncomputed_tokens
                chunks.append(Chunk(request, request.computed_tokens, length, last))
        outcomes = iter(executor.execute(StepPlan(tuple(chunks))))
        for chunk in chunks:
            chunk.request.computed_tokens += chunk.length
            if chunk.samples:
                chunk.request.token_ids.append(next(outcomes).token_id)
    for request in requests:
        executor.remove(request)


def random_ids(count: int, seed: int = 3) -> list[int]:
    return [random.Random(f"{seed}-{n}").randrange(211) for n in range(count)]


def logits_of(executor: Torch, request: EngineRequest, start: int, end: int) -> torch.Tensor:
    """Logits after computing tokens `start … end - 1` of `request` in one chunk."""
    return executor.logits(StepPlan((Chunk(request, start, end - start, True),)))[0]


PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who told "
    "stories to the children every evening about the ships that he had seen in his youth, and "
    "about the storms that had taken some of them. One evening, a little girl asked him",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
)


@pytest.mark.model
def test_greedy_fp32_is_token_for_token_what_transformers_generates() -> None:
    folder = builtin.ensure("builtin://smollm2-135m")
    tokenizer = HuggingFaceTokenizer.from_folder(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    executor = executor_of(folder, block_tokens=16)
    requests = requests_of(prompts, 48, 16)
    generate(executor, requests, CHUNK_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, prompt in zip(requests, prompts, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=None
        )
        assert request.token_ids == expected[0].tolist()


@pytest.mark.model
def test_bf16_stays_near_fp32() -> None:
    folder = builtin.ensure("builtin://smollm2-135m")
    ids = HuggingFaceTokenizer.from_folder(folder).encode(PROMPTS[1])
    request = requests_of([ids], 1, 8)[0]
    exact = torch.log_softmax(logits_of(executor_of(folder), request, 0, len(ids)), -1)
    rough = torch.log_softmax(logits_of(executor_of(folder, BF16), request, 0, len(ids)), -1)
    divergence = torch.sum(exact.exp() * (exact - rough))
    assert divergence < 0.02
    assert int(exact.argmax()) in rough.topk(3).indices.tolist()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 24, 200])
def test_other_head_dims_give_the_same_tokens_in_any_chunks(tiny: Path, chunk_tokens: int) -> None:
    prompts = [random_ids(length, seed=length) for length in (1, 7, 8, 61)]
    executor = executor_of(tiny)
    requests = requests_of(prompts, 12, BLOCK_TOKENS, seed=chunk_tokens)
    generate(executor, requests, chunk_tokens)
    for request in requests:
        best = reference_logits(tiny, request.token_ids).argmax(-1)
        assert request.token_ids[request.prompt_tokens :] == (
            best[request.prompt_tokens - 1 : -1].tolist()
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 50000.0,
            }
        },
    ],
    ids=["MHA, tied", "MQA", "linear rotary", "llama3 rotary"],
)
def test_logits_equal_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, **changes)
    ids = random_ids(150)
    expected = reference_logits(folder, ids)[-1]
    request = requests_of([ids], 1, BLOCK_TOKENS)[0]
    torch.testing.assert_close(
        logits_of(executor_of(folder), request, 0, 150), expected, atol=1e-3, rtol=1e-4
    )


def test_batch_of_very_mixed_lengths_equals_each_alone(tiny: Path) -> None:
    executor = executor_of(tiny)
    lengths = (200, 3, 150, 17, 199, 1)
    requests = requests_of([random_ids(n, seed=n) for n in lengths], 1, BLOCK_TOKENS)
    alone = [logits_of(executor, r, 0, len(r.token_ids)) for r in requests]
    chunks = tuple(Chunk(r, len(r.token_ids) - 1, 1, True) for r in requests)
    together = executor.logits(StepPlan(chunks))
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_reused_prefix_gives_equal_logits(tiny: Path) -> None:
    executor = executor_of(tiny)
    shared = random_ids(40)
    first, second = requests_of([[*shared, 5, 6], [*shared, 9, 9, 9]], 1, BLOCK_TOKENS)
    expected = logits_of(executor, second, 0, 43)
    logits_of(executor, first, 0, 42)
    second.block_table[:5] = first.block_table[:5]
    torch.testing.assert_close(logits_of(executor, second, 40, 43), expected, atol=1e-4, rtol=1e-4)


def test_copy_on_write_keeps_the_original(tiny: Path) -> None:
    executor = executor_of(tiny)
    ids = random_ids(12)
    original, branch = requests_of([[*ids, 1], [*ids, 2]], 1, BLOCK_TOKENS)
    expected = [logits_of(executor, request, 0, 13) for request in (original, branch)]
    fresh = branch.block_table[1]
    branch.block_table[0] = original.block_table[0]
    logits_of(executor, original, 0, 13)
    executor.execute(StepPlan((), copies=(BlockCopy(original.block_table[1], fresh),)))
    after = [logits_of(executor, branch, 12, 13), logits_of(executor, original, 12, 13)]
    torch.testing.assert_close(after[0], expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after[1], expected[0], atol=1e-4, rtol=1e-4)


def test_more_samples_than_rows_of_logits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscaler_sidecar.executors.workspace.LOGIT_ROWS", 2)
    executor = executor_of(tiny)
    requests = requests_of([random_ids(9, seed=n) for n in range(5)], 1, BLOCK_TOKENS)
    expected = [int(logits_of(executor, r, 0, 9).argmax()) for r in requests]
    for request in requests:
        executor.add(request, GREEDY)
    plan = StepPlan(tuple(Chunk(r, 0, 9, True) for r in requests))
    assert [token.token_id for token in executor.execute(plan)] == expected


def test_seeded_draws_do_not_depend_on_the_batch(tiny: Path) -> None:
    executor = executor_of(tiny)
    requests = requests_of([random_ids(9, seed=n) for n in range(4)], 1, BLOCK_TOKENS)
    for seed, request in enumerate(requests):
        executor.add(request, SamplingParams(temperature=1.3, seed=seed))
    chunks = [Chunk(r, 0, 9, True) for r in requests]
    together = [token.token_id for token in executor.execute(StepPlan(tuple(chunks)))]
    alone = [executor.execute(StepPlan((chunk,)))[0].token_id for chunk in reversed(chunks)]
    assert together == alone[::-1]
    assert len(set(together)) > 1


def test_bytes_are_counted_and_are_what_the_architecture_says(tiny: Path) -> None:
    for compute, name in ((FP32, "float32"), (BF16, "bfloat16")):
        executor = executor_of(tiny, compute)
        architecture = executor.config.architecture
        assert executor.weight_bytes == architecture.weight_bytes(name)
        assert executor.block_bytes == architecture.kv_bytes_per_token(name) * BLOCK_TOKENS
        assert executor.pool_bytes == executor.block_bytes * BLOCKS
        assert executor.report.compute_dtype == executor.report.kv_dtype == name


@pytest.mark.parametrize("compute", [FP32, BF16], ids=["fp32", "bf16"])
def test_buffers_are_what_the_budget_predicts(tiny: Path, compute: ComputeDtype) -> None:
    executor = executor_of(tiny, compute)
    settings = ResolvedSettings(
        memory_utilization_percent=90,
        max_context_tokens=256,
        max_sequences=8,
        step_tokens=256,
        block_tokens=BLOCK_TOKENS,
        compute_dtype=compute.name,
        kv_dtype=compute.name,
    )
    model = executor.config.architecture
    predicted = own.step_buffer_bytes(model, settings) + own.context_buffer_bytes(model, settings)
    assert executor.workspace_bytes == predicted


def test_step_costs_are_measured_and_finite(tiny: Path) -> None:
    costs = executor_of(tiny).measure()
    assert 0 < costs.base_seconds + costs.per_sequence_seconds < 10
    assert 0 <= costs.per_context_token_seconds < 1
    assert 0 <= costs.per_prefill_token_seconds < 1
