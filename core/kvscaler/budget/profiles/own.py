"""How our own paged engine spends memory, on a CPU and on CUDA.

The executor allocates its buffers once, by the formulas here, so that these lines are exact rather
than estimates of a peak: a test holds its tensors equal to them. It computes at most `step_tokens`
tokens and makes at most `LOGIT_ROWS` rows of logits at a time.
"""

from kvscaler.budget.layout import PoolLayout
from kvscaler.budget.lines import Basis, BudgetLine
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture, ModelNotUnderstood, canonical_dtype, dtype_bytes

MIB = 1 << 20
FLOAT_BYTES = 4
COMPLEX_BYTES = 8
SORTED_BYTES = 24
"""One vocabulary entry of a sorted row: probability, index, and sums in double precision."""

CPU_RUNTIME_BYTES = 592 * MIB
"""Resident set of the server without tensors: interpreter, torch's libraries (of the CUDA build,
which is what the index has), HTTP, tokenizer. Measured by `bench/bytes.py`."""
CUDA_CONTEXT_BYTES = 500 * MIB
"""CUDA context and libraries outside torch's allocator (0.13-0.25 GiB in vLLM's start-up
figures at one rank, more before the first kernel of every library is loaded)."""
BUCKET_BYTES = 4 * MIB
"""Keys and values gathered for one call of attention: about a core's share of cache, so that
attention finds there what was just gathered. One longer sequence takes what it needs."""
PREFILL_ROWS = 128
"""Query rows per call of attention after a prefix; each call skips what lies behind its last."""
LOGIT_ROWS = 32
"""Rows of logits made at a time; more sampled sequences take another pass over the head."""
RANDOM_ROWS = 8
"""Rows that random draws work on at a time, each in several copies."""

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_STEP_TOKENS = 512
DEFAULT_MAX_SEQUENCES = 64
CUDA_STEP_TOKENS = 2048
CUDA_MAX_SEQUENCES = 256
"""On a card, a step's weights are read once for all its tokens: 512 prompt tokens are too few to
pay for them, and 64 sequences would leave most of its KV memory unused. The values are vLLM's
defaults for cards below 70 GB."""
DEFAULT_UTILIZATION_PERCENT = 90.0


def gathered_elements(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Elements of the buffer for gathered blocks: a bucket, or one sequence of the whole context."""
    element = dtype_bytes(settings.kv_dtype)
    block = settings.block_tokens * 2 * model.kv_heads * model.head_dim
    longest = -(-_context_tokens(model, settings) // settings.block_tokens)
    return max(1, BUCKET_BYTES // (block * element), longest) * block


def context_buffer_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Buffers that grow with the context: gathered blocks, causal mask, rotary angles."""
    context = _context_tokens(model, settings)
    mask = PREFILL_ROWS * (context + PREFILL_ROWS) * dtype_bytes(settings.compute_dtype)
    angles = context * (model.head_dim // 2) * COMPLEX_BYTES
    gathered = gathered_elements(model, settings) * dtype_bytes(settings.kv_dtype)
    return gathered + mask + angles


def step_buffer_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Buffers that grow with the step: one layer's activations for all its tokens, and logits.

    Per token: the residual, its normed copy and norm, q/k/v, attention's output, gate and up,
    their product, its angles, and an fp32 copy of q and k where computing is in fewer bits.
    """
    element = dtype_bytes(settings.compute_dtype)
    q_width = model.attention_heads * model.head_dim
    kv_width = model.kv_heads * model.head_dim
    per_token = 2 * model.hidden_size + 2 * q_width + 2 * kv_width + 3 * model.intermediate_size
    rotated = 0 if element == FLOAT_BYTES else (q_width + kv_width) * FLOAT_BYTES
    angles = model.head_dim // 2 * COMPLEX_BYTES + FLOAT_BYTES
    logits = min(LOGIT_ROWS, settings.max_sequences) * model.vocab_size * element
    return settings.step_tokens * (per_token * element + rotated + angles) + logits


def temporary_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Peak of what a step still allocates: attention's output, or what sampling holds.

    Sampling holds fp32 logits where computing is in fewer bits, log-probabilities of all rows,
    three copies of the rows that it draws for, and one row's sorted copy with its running sum.
    """
    element = dtype_bytes(settings.compute_dtype)
    width = model.attention_heads * model.head_dim
    rows = min(LOGIT_ROWS, settings.max_sequences)
    copies = rows * (1 if element == FLOAT_BYTES else 2)
    drawn = 3 * min(RANDOM_ROWS, settings.max_sequences)
    sampling = ((copies + drawn) * FLOAT_BYTES + SORTED_BYTES) * model.vocab_size
    return max(settings.step_tokens * width * element, sampling)


def _context_tokens(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """The longest context; before the pool has decided it, the model's own is the bound."""
    return settings.max_context_tokens or model.max_context_tokens


class _OwnProfile:
    """What both devices share: utilization of the device, one table of full attention."""

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """The stated share of the device."""
        return int((accelerator.memory_bytes or 0) * settings.memory_utilization_percent / 100)

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """Blocks over all layers. Raises `ModelNotUnderstood` for layers that are not computed."""
        kinds = {group.kind.value for group in model.groups}
        if not model.uniform:
            raise ModelNotUnderstood(
                f"the kvscaler engine computes full attention only, and this model has layers of "
                f"kind {', '.join(sorted(kinds))}: serve it with another engine"
            )
        block_bytes = model.kv_bytes_per_token(settings.kv_dtype) * settings.block_tokens
        return PoolLayout.uniform(model.layers, settings.block_tokens, block_bytes)

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """Tokens of all blocks."""
        return blocks * layout.block_tokens


class OwnCpuProfile(_OwnProfile):
    """Our engine with the Torch executor on a CPU: memory is the container's limit."""

    name = "kvscaler-cpu"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Compute in fp32 unless told: only a CPU with bf16 instructions is faster in bf16."""
        return _resolve(settings, default_compute_dtype="float32")

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations, attention scratch and the process itself."""
        runtime = BudgetLine(
            "runtime",
            CPU_RUNTIME_BYTES,
            Basis.DEFAULT,
            int(CPU_RUNTIME_BYTES * 0.9),
            int(CPU_RUNTIME_BYTES * 1.1),
            "interpreter, torch libraries, server (measured)",
        )
        return (*_common_lines(model, settings), runtime)


class OwnCudaProfile(_OwnProfile):
    """Our engine with the Torch executor on one CUDA device."""

    name = "kvscaler-cuda"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Compute in the model's own element type unless told."""
        return _resolve(
            settings,
            default_compute_dtype=model.native_dtype,
            default_step_tokens=CUDA_STEP_TOKENS,
            default_max_sequences=CUDA_MAX_SEQUENCES,
        )

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations, attention scratch and the CUDA context."""
        context = BudgetLine(
            "cuda context",
            CUDA_CONTEXT_BYTES,
            Basis.DEFAULT,
            CUDA_CONTEXT_BYTES // 2,
            CUDA_CONTEXT_BYTES * 2,
            "driver context and libraries outside torch's allocator",
        )
        return (*_common_lines(model, settings), context)


def _resolve(
    settings: EngineSettings,
    default_compute_dtype: str,
    default_step_tokens: int = DEFAULT_STEP_TOKENS,
    default_max_sequences: int = DEFAULT_MAX_SEQUENCES,
) -> ResolvedSettings:
    compute = default_compute_dtype
    if settings.compute_dtype != AUTO:
        compute = canonical_dtype(settings.compute_dtype)
    return ResolvedSettings(
        memory_utilization_percent=(
            settings.memory_utilization_percent or DEFAULT_UTILIZATION_PERCENT
        ),
        max_context_tokens=settings.max_context_tokens,
        max_sequences=settings.max_sequences or default_max_sequences,
        step_tokens=settings.step_tokens or default_step_tokens,
        block_tokens=settings.block_tokens or DEFAULT_BLOCK_TOKENS,
        compute_dtype=compute,
        kv_dtype=compute if settings.kv_dtype == AUTO else canonical_dtype(settings.kv_dtype),
    )


def _common_lines(model: ModelArchitecture, settings: ResolvedSettings) -> tuple[BudgetLine, ...]:
    buffers = step_buffer_bytes(model, settings)
    temporaries = temporary_bytes(model, settings)
    return (
        BudgetLine.exact(
            "weights",
            model.weight_bytes(settings.compute_dtype),
            f"{model.parameters:,} parameters x {dtype_bytes(settings.compute_dtype)} B "
            f"({settings.compute_dtype})",
        ),
        BudgetLine(
            "activations",
            buffers + temporaries,
            Basis.COMPUTED,
            buffers,
            buffers + temporaries,
            f"{settings.step_tokens} step tokens, logits and sampling",
        ),
        BudgetLine.exact(
            "attention scratch",
            context_buffer_bytes(model, settings),
            f"gathered keys and values, mask and angles of {_context_tokens(model, settings)} "
            "tokens",
        ),
    )
