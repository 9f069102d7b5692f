"""What a person should know before trusting a plan: guesses, limits that bind, memory that is lost."""

from collections.abc import Iterator

from kvscaler.budget import gib

from kvscaler_cli.planning.answer import Answer
from kvscaler_cli.planning.question import OWN_ENGINES

WIDE_INTERVAL = 0.03
"""Half-width of the KV cache's interval, as a share of it, from which on it is worth a word."""
LARGE_WASTE = 0.05


def warnings_of(answer: Answer) -> tuple[str, ...]:
    """Warnings, the most important first."""
    return (
        *_about_input(answer),
        *_about_limits(answer),
        *_about_pool(answer),
        *_about_trust(answer),
    )


def _about_input(answer: Answer) -> Iterator[str]:
    deployment, budget = answer.deployment, answer.budget
    model, settings = deployment.model, deployment.settings
    if budget.max_context_tokens > model.max_context_tokens:
        yield (
            f"--max-model-len {budget.max_context_tokens:,} is longer than the model's own context "
            f"of {model.max_context_tokens:,} tokens; engines refuse it unless told to extend it"
        )
    if settings.tensor_parallel > 1 and model.attention_heads % settings.tensor_parallel:
        yield (
            f"{model.attention_heads} attention heads do not divide among "
            f"{settings.tensor_parallel} ranks; engines refuse that --tensor-parallel"
        )
    if settings.speculative_tokens and not settings.draft_layers:
        yield (
            "the model has no prediction layers of its own: drafts looked up in the prompt cost no "
            "memory, but a draft model's weights and cache are not in these figures; plan it by itself "
            "and lower --memory by what it takes"
        )
    if deployment.profile.name in OWN_ENGINES and budget.kv_dtype != budget.compute_dtype:
        yield (
            f"the kvscaler engine keeps keys and values as it computes ({budget.compute_dtype}) and "
            f"does not start with a cache in {budget.kv_dtype}"
        )
    if deployment.accelerator.unified:
        yield (
            f"{budget.accelerator} shares its memory with the host: what other processes and the "
            "page cache hold comes off it"
        )


def _about_limits(answer: Answer) -> Iterator[str]:
    budget, demand = answer.budget, answer.question.demand
    if not budget.fit.fits:
        return
    if answer.pool_bound_context:
        yield (
            f"the pool holds {budget.max_context_tokens:,} tokens, less than the model's context of "
            f"{answer.deployment.model.max_context_tokens:,}; most engines start only with "
            f"--max-model-len {budget.max_context_tokens} or less"
        )
    if demand is not None and demand.tokens > budget.max_context_tokens:
        yield (
            f"a request of {demand.tokens:,} tokens is longer than the longest context of "
            f"{budget.max_context_tokens:,}: the engine refuses it"
        )
    elif demand is not None and answer.request_blocks:
        fit_in_memory = budget.blocks // answer.request_blocks
        if fit_in_memory > budget.max_sequences:
            yield (
                f"memory holds {fit_in_memory:,} such requests, but the engine runs "
                f"{budget.max_sequences:,} sequences at once; raise --max-num-seqs to use it"
            )


def _about_pool(answer: Answer) -> Iterator[str]:
    lost, pool = answer.waste, answer.budget.pool_bytes
    if lost is None or not pool:
        return
    for size, words in (
        (lost.replication_bytes, "holds copies of keys and values that another rank has too"),
        (lost.padding_bytes, "pads pages of unlike layers to one size and holds nothing"),
        (lost.rounding_bytes, "is the rest of last blocks and of windows, and holds nothing"),
    ):
        if size > LARGE_WASTE * pool:
            yield f"{gib(size)} of the KV cache ({size / pool:.0%}) {words}"


def _about_trust(answer: Answer) -> Iterator[str]:
    budget = answer.budget
    if answer.deployment.accelerator.name == "custom":
        yield (
            "the device is known by its memory only; its class decides some of the engine's "
            "defaults, so name it with --accelerator where it is known"
        )
    if budget.kv_bytes <= 0:
        return
    half = (budget.kv_high_bytes - budget.kv_low_bytes) / 2
    if half > WIDE_INTERVAL * budget.kv_bytes:
        widest = max(budget.lines, key=lambda line: line.high_bytes - line.low_bytes)
        yield (
            f"the KV cache may be {gib(half)} ({half / budget.kv_bytes:.0%}) off, mostly by "
            f"{widest.name}; give what the engine prints at its start with --observed to correct it"
        )
