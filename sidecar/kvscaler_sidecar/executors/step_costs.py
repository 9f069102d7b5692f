"""Measure the constants of the linear step-time model on this very machine, before traffic.

`seconds = base + per_sequence * decodes + per_context_token * (context + pairs)
+ per_prefill_token * prefill`: on a CPU, a pair of prefill's attention counts as a context token.
Each constant is a difference of two steps that differ in one term only, each step the fastest of a
few, since others on the machine can only slow it. The pool must not be in use: contents of blocks
are overwritten and left as they fall, finite.
"""

import time
from typing import Protocol

from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, StepPlan
from kvscaler.protocol.state import StepCosts

from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams

REPEATS = 2
_MANY_SEQUENCES = 8
_LONG_CONTEXT_TOKENS = 512
_PREFILL_TOKENS = 32
_GREEDY = SamplingParams(temperature=0.0)


class Stepper(Protocol):
    """What is measured: an executor with its pool."""

    block_tokens: int

    @property
    def kv_blocks(self) -> int:
        """Blocks of the pool."""

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        """As in `seam.Executor`."""

    def remove(self, request: EngineRequest) -> None:
        """As in `seam.Executor`."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """As in `seam.Executor`."""


def measure_step_costs(executor: Stepper, max_context_tokens: int, step_tokens: int) -> StepCosts:
    """Constants of the step-time model; a term that a small pool can't show is taken as 0."""
    pool_tokens = executor.kv_blocks * executor.block_tokens
    long = min(_LONG_CONTEXT_TOKENS, pool_tokens, max_context_tokens)
    short = min(executor.block_tokens, long)
    prefill = min(_PREFILL_TOKENS, long, step_tokens)
    batch = min(_MANY_SEQUENCES, step_tokens)
    _decode_seconds(executor, 1, short)  # the first step of all pays for what is made lazily
    one = _decode_seconds(executor, 1, short)
    many = _decode_seconds(executor, batch, short)
    deep = _decode_seconds(executor, batch, long)
    wide = _seconds(executor, [_chunk(executor, 0, 0, prefill)])
    context = max(0.0, (deep - many) / (batch * (long - short))) if long > short else 0.0
    sequence = max(0.0, (many - one) / (batch - 1) - context * short) if batch > 1 else 0.0
    base = max(0.0, one - sequence - context * short)
    pairs = prefill * (prefill + 1) // 2
    token = max(0.0, (wide - base - context * pairs) / prefill)
    return StepCosts(
        base_seconds=base,
        per_sequence_seconds=sequence,
        per_context_token_seconds=context,
        per_prefill_token_seconds=token,
    )


def _decode_seconds(executor: Stepper, sequences: int, context_tokens: int) -> float:
    chunks = [_chunk(executor, n, context_tokens - 1, 1) for n in range(sequences)]
    return _seconds(executor, chunks)


def _chunk(executor: Stepper, number: int, start: int, length: int) -> Chunk:
    tokens = start + length
    request = EngineRequest.from_prompt(f"measure-{number}", [0] * tokens, 1, 0.0)
    # Blocks may be shared: only the time counts.
    needed = -(-tokens // executor.block_tokens)
    request.block_table = list(range(needed))
    return Chunk(request, start, length, samples=True)


def _seconds(executor: Stepper, chunks: list[Chunk]) -> float:
    plan = StepPlan(tuple(chunks))
    for chunk in chunks:
        executor.add(chunk.request, _GREEDY)
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        executor.execute(plan)
        best = min(best, time.perf_counter() - begin)
    for chunk in chunks:
        executor.remove(chunk.request)
    return best
