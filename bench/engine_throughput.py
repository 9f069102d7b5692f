"""Decode speed of the Torch executor against transformers `generate`, in one process, by turns.

Same weights, number format, threads, prompts and greedy choice. A round times every decode step
by itself and takes the median, so that one slow moment of the machine does not decide; ratios are
made round by round. Contexts are 128 to 160 tokens, and all sequences of a batch decode together.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from kvscaler.budget.settings import AUTO, CPU_COMPUTE_DTYPES
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, StepPlan
from kvscaler_sidecar.executors.dtype import ComputeDtype, choose_compute_dtype
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.executors.threads import thread_count
from kvscaler_sidecar.executors.torch_cpu import Torch, TorchSettings
from kvscaler_sidecar.weights import builtin

BATCHES = (1, 8, 16)
PROMPT_TOKENS = 128
BLOCK_TOKENS = 16
FLOORS = {
    "float32": {1: (">= 1.1", None), 8: (">= 0.95", ">= 1.1"), 16: (None, None)},
    "bfloat16": {1: (">= 1.3", None), 8: (">= 1.8", None), 16: (">= 1.8", None)},
}


def prompts_of(batch: int) -> list[list[int]]:
    """Random prompts, the same for both subjects."""
    numbers = random.Random(batch)
    return [[numbers.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def tokens_per_second(batch: int, stamps: list[float]) -> float:
    """From the times at which each step's tokens were there."""
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    return batch / statistics.median(steps)


def ours(executor: Torch, batch: int, new_tokens: int) -> Callable[[], float]:
    """One round of the executor: prefill, then `new_tokens` decode steps in shuffled blocks."""

    def measure() -> float:
        free = list(range(executor.kv_blocks))
        random.Random(0).shuffle(free)
        requests = []
        for number, prompt in enumerate(prompts_of(batch)):
            request = EngineRequest.from_prompt(f"r{number}", prompt, new_tokens, 0.0)
            needed = -(-(PROMPT_TOKENS + new_tokens) // BLOCK_TOKENS)
            request.block_table = [free.pop() for _ in range(needed)]
            executor.add(request, SamplingParams(temperature=0.0))
            step(executor, [request])
            requests.append(request)
        stamps = [time.perf_counter()]
        for _ in range(new_tokens - 1):
            step(executor, requests)
            stamps.append(time.perf_counter())
        for request in requests:
            executor.remove(request)
        return tokens_per_second(batch, stamps)

    return measure


def step(executor: Torch, requests: list[EngineRequest]) -> None:
    """Compute what each request has not computed yet, and append the sampled tokens."""
    chunks = tuple(Chunk(r, r.computed_tokens, r.uncomputed_tokens, True) for r in requests)
    for chunk, token in zip(chunks, executor.execute(StepPlan(chunks)), strict=True):
        chunk.request.computed_tokens += chunk.length
        chunk.request.token_ids.append(token.token_id)


def theirs(model: Any, batch: int, new_tokens: int) -> Callable[[], float]:
    """One round of transformers `generate` with its own cache and defaults."""
    ids = torch.tensor(prompts_of(batch))

    def measure() -> float:
        stamps: list[float] = []

        def stamp(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return scores

        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                logits_processor=[stamp],
            )
        return tokens_per_second(batch, stamps)

    return measure


def main() -> int:
    """Measure and report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default=AUTO, choices=CPU_COMPUTE_DTYPES)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(thread_count())
    folder = builtin.ensure("builtin://smollm2-135m")
    compute: ComputeDtype = choose_compute_dtype(options.dtype)
    harness.progress(f"{compute.name}: {compute.reason}; {torch.get_num_threads()} threads")
    executor = Torch.load(
        folder,
        TorchSettings(
            block_tokens=BLOCK_TOKENS,
            step_tokens=PROMPT_TOKENS,
            max_sequences=max(options.batches),
            max_context_tokens=PROMPT_TOKENS + options.new_tokens,
            compute=compute,
        ),
    )
    executor.allocate(max(options.batches) * -(-(PROMPT_TOKENS + options.new_tokens) // 16))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute.dtype).eval()

    figures, detail = [], {}
    for batch in options.batches:
        harness.progress(f"batch {batch}")
        subjects = {
            "torch": ours(executor, batch, options.new_tokens),
            "transformers": theirs(model, batch, options.new_tokens),
        }
        harness.alternate(subjects, rounds=1)  # what is made at the first call
        samples = harness.alternate(subjects, rounds=options.rounds)
        ratio = harness.ratio(samples["torch"], samples["transformers"])
        floor, aim = FLOORS[compute.name].get(batch, (None, None))
        figures.append(
            harness.Figure(
                f"decode_ratio_to_transformers_batch_{batch}",
                ratio.median,
                floor=floor,
                aim=aim,
                peer={"transformers_tokens_per_second": samples["transformers"].median},
            )
        )
        detail[f"batch_{batch}"] = {
            **{name: sample.to_json() for name, sample in samples.items()},
            "ratio": ratio.to_json(),
        }
    detail |= {
        "compute_dtype": compute.name,
        "reason": compute.reason,
        "threads": torch.get_num_threads(),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": options.new_tokens,
    }
    return harness.report(
        "engine_throughput",
        figures,
        detail,
        check=options.check,
        packages=("torch", "transformers"),
    )


if __name__ == "__main__":
    sys.exit(main())
