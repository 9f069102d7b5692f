"""What every executor refuses to compute: a plan that exceeds what was allocated for it."""

from kvscaler.engine.step import StepPlan


class ExecutorError(Exception):
    """The executor can't do what was asked; the words name what, why and the next step."""


def check_plan(
    plan: StepPlan, *, block_tokens: int, step_tokens: int, max_context_tokens: int
) -> None:
    """Raises `ExecutorError` for a step that is too long, or a token without a block."""
    rows = sum(chunk.length for chunk in plan.chunks)
    if rows > step_tokens:
        raise ExecutorError(
            f"a step of {rows} tokens exceeds the {step_tokens} that buffers "
            "were made for; lower the scheduler's step tokens"
        )
    for chunk in plan.chunks:
        end = chunk.start + chunk.length
        if end > max_context_tokens:
            raise ExecutorError(
                f"request {chunk.request.request_id}: {end} tokens exceed the context of "
                f"{max_context_tokens}; refuse it at admission"
            )
        if end > len(chunk.request.block_table) * block_tokens:
            raise ExecutorError(
                f"request {chunk.request.request_id}: no block for token {end - 1}; the "
                "scheduler must append blocks before it plans the chunk"
            )
