"""Step times of a named card: fits to measured steps where there are some, else a roofline.

A roofline alone is off by the share of its peak that a card reaches in practice. Those shares are
taken from one measured pair, Llama-3.1-8B on an H100, and carried over to other models and cards:

    base         = streamed weight bytes / (bandwidth · b) + layers · o
    per context  = KV bytes of a token / (bandwidth · b)
    per prefill  = 2 · parameters without embeddings / (FLOP rate · f)
    per pair     = 4 · attention heads · head dim · layers / (FLOP rate · f)
    per sequence = q · per prefill: a decoding sequence's own operations hide behind the weights

Against the other fits (an L40S, and a run on an RTX 4090) it is within 20 % on base, context and
prefill; the cost of a sequence, a few per cent of a step, is no better than its order.
"""

from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture, catalogue, dtype_bytes
from kvscaler.performance.step_time import StepTimeModel

_FIT = (
    "least-squares fit to step latencies of vLLM 0.24 in the aiconfigurator-core 0.12.0 silicon "
    "database (NVIDIA, Apache-2.0)"
)

LLAMA_3_1_8B_H100 = StepTimeModel(
    base_seconds=6.342e-3,
    per_sequence_seconds=12.15e-6,
    per_context_token_seconds=41.563e-9,
    per_prefill_token_seconds=20.884e-6,
    per_prefill_pair_seconds=0.7831e-9,
    source=f"Llama-3.1-8B bf16, one H100 SXM: {_FIT}; mean error 2.5 % decode, 4 % prefill",
)
"""Mixed steps are overstated by 7 % in the mean, which errs towards more replicas: prefill hides
partly behind the weights' read."""

LLAMA_3_1_8B_L40S = StepTimeModel(
    base_seconds=22.334e-3,
    per_sequence_seconds=35.86e-6,
    per_context_token_seconds=192.153e-9,
    per_prefill_token_seconds=69.417e-6,
    per_prefill_pair_seconds=2.9912e-9,
    source=f"Llama-3.1-8B bf16, one L40S: {_FIT}; mean error 2.7 % decode, 5 % prefill",
)

_FITTED_DTYPE = "bfloat16"
_FITS = {
    ("llama-3.1-8b", "nvidia-h100-80gb-hbm3"): LLAMA_3_1_8B_H100,
    ("llama-3.1-8b", "nvidia-l40s"): LLAMA_3_1_8B_L40S,
}
"""By name in the catalogue and of the accelerator, computed and cached in bfloat16."""

BANDWIDTH_SHARE = 0.9414
"""b: 131,072 bytes of KV per token at 41.563 ns on 3.35 TB/s."""
LAYER_SECONDS = 49.45e-6
"""o: what the fit's base leaves after 15.01 GB of weights at that bandwidth, over 32 layers."""
FLOPS_SHARE = 0.6759
"""f: 13.96 GFLOP per prompt token at 20.884 us on 989 TFLOP/s."""
SEQUENCE_SHARE = 0.5818
"""q: 12.15 us for a decoding sequence, 20.884 us for a prompt token."""


class StepTimeUnknown(LookupError):
    """No step times can be told: a rate of the device is not known, or the model is not dense."""


def step_time_on(
    model: ModelArchitecture, accelerator: Accelerator, compute_dtype: str, kv_dtype: str
) -> StepTimeModel:
    """Step times of `model` on one `accelerator`.

    Raises `StepTimeUnknown` for a device without a bandwidth or a FLOP rate in `compute_dtype`, and
    for a model that is not dense.
    """
    for (name, card), fit in _FITS.items():
        if (
            card == accelerator.name
            and compute_dtype == kv_dtype == _FITTED_DTYPE
            and catalogue.find(name).architecture.digest == model.digest
        ):
            return fit
    return roofline(model, accelerator, compute_dtype, kv_dtype)


def roofline(
    model: ModelArchitecture, accelerator: Accelerator, compute_dtype: str, kv_dtype: str
) -> StepTimeModel:
    """Step times from bandwidth and FLOP rate alone; raises as `step_time_on`.

    The formulas are of a dense model whose layers all attend to everything.
    """
    if not model.uniform or model.experts_per_token or model.quantization is not None:
        raise StepTimeUnknown(
            f"no step times are known of a {model.model_type} model with experts, quantized "
            "weights or layers that are not full attention: take a dense model in its own format"
        )
    bandwidth = accelerator.bandwidth_bytes_per_second
    flops = accelerator.flops_per_second.get(compute_dtype)
    if bandwidth is None or flops is None:
        missing = "memory bandwidth" if bandwidth is None else f"FLOP rate in {compute_dtype}"
        raise StepTimeUnknown(
            f"accelerator {accelerator.name} has no stated {missing}, so its step times can't be "
            "told: name a card that has, such as nvidia-h100-80gb-hbm3"
        )
    embedding = model.vocab_size * model.hidden_size
    streamed = model.parameters - (0 if model.tied_embeddings else embedding)
    body = streamed - embedding  # the head is computed for sampled rows only
    rate, speed = BANDWIDTH_SHARE * bandwidth, FLOPS_SHARE * flops
    prefill = 2 * body / speed
    width = model.attention_heads * model.head_dim
    return StepTimeModel(
        base_seconds=streamed * dtype_bytes(compute_dtype) / rate + LAYER_SECONDS * model.layers,
        per_sequence_seconds=SEQUENCE_SHARE * prefill,
        per_context_token_seconds=model.kv_bytes_per_token(kv_dtype) / rate,
        per_prefill_token_seconds=prefill,
        per_prefill_pair_seconds=4 * width * model.layers / speed,
        source=f"roofline of {accelerator.name} with the shares of its peaks that an H100 reaches",
    )
