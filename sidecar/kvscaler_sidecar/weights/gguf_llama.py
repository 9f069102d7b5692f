"""A llama-architecture GGUF file as Hugging Face configuration and tensors.

Two things differ between the forms besides names. GGUF's converter permutes the rows of Q and K so
that rotary embedding pairs neighbours (2i, 2i+1); Hugging Face pairs halves (i, i + head_dim/2),
so the rows are put back. And the weights are quantised: they are dequantised, then rounded to bf16,
the type that the model was trained and published in. The rounding is 2^-9 of a value and the 4-bit
step some 2^-4, so it adds nothing that the quantisation has not already lost, and the folder is half
the size; the folder, not the GGUF, is the model that every engine here serves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvscaler_sidecar.weights.builtin import BuiltinModelError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Bf16Tensor:
    """A tensor's name, its shape (rows first) and its bf16 bit patterns."""

    name: str
    shape: tuple[int, ...]
    bits: NDArray[np.uint16]


def field(reader: Any, key: str, default: Any = None) -> Any:
    """One metadata value of a GGUF file; an absent key without a default is an error."""
    found = reader.fields.get(key)
    if found is not None:
        return found.contents()
    if default is None:
        raise BuiltinModelError(
            f"GGUF metadata: no {key!r}; the file is not a complete llama model, take another one"
        )
    return default


def hugging_face_config(reader: Any) -> dict[str, Any]:
    """The `config.json` of a llama-architecture GGUF file.

    Raises:
        BuiltinModelError: another architecture, or a feature that this mapping would lose.
    """
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise BuiltinModelError(
            f"GGUF metadata: architecture {architecture!r}; only 'llama' can be converted"
        )
    for key in reader.fields:
        if key.startswith(("llama.rope.scaling.", "llama.expert")):
            raise BuiltinModelError(
                f"GGUF metadata: {key!r} is set and this converter would lose it; "
                "convert a model without rope scaling and experts"
            )
    hidden = field(reader, "llama.embedding_length")
    heads = field(reader, "llama.attention.head_count")
    head_dim = field(reader, "llama.attention.key_length", hidden // heads)
    rotary_dim = field(reader, "llama.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise BuiltinModelError(
            f"GGUF metadata: rotary dimension {rotary_dim} of head dimension {head_dim}; "
            "partial rotary embedding can't be converted"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", heads),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest_float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": shortest_float(field(reader, "llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
    }


def shortest_float(value: float) -> float:
    """The decimal that a 32-bit float was written from: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face llama of this configuration has, with its shape."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    by_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in by_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def hugging_face_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor, `blk.0.attn_q.weight` for one."""
    if gguf_name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise BuiltinModelError(
        f"GGUF tensor {gguf_name!r}: has no place in a Hugging Face llama; leaving it out would "
        "change the model, so nothing was written"
    )


def unpermute_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order of Q or K: within a head, row (i, j) of [dim/2, 2] goes to (j, i).

    Source: llama.cpp, `convert_hf_to_gguf.py`, `LlamaModel.permute` is the inverse.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of finite fp32 values, rounded to nearest, ties to even."""
    if not np.isfinite(values).all():
        raise BuiltinModelError("weights: a dequantised value is not finite; the file is damaged")
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def hugging_face_tensors(reader: Any, config: dict[str, Any]) -> Iterator[Bf16Tensor]:
    """Every tensor of the model in name order, one in memory at a time.

    Raises:
        BuiltinModelError: a tensor is missing, unknown or of another shape than the configuration
            says; found before the first one is returned.
    """
    shapes = expected_shapes(config)
    by_name = {hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    missing = sorted(set(shapes) - set(by_name))
    surplus = sorted(set(by_name) - set(shapes))
    if missing or surplus:
        raise BuiltinModelError(
            f"GGUF tensors: missing {missing[:3]}, unexpected {surplus[:3]} for "
            f"{config['num_hidden_layers']} layers; take a complete file"
        )
    for name, tensor in by_name.items():
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shapes[name]:
            raise BuiltinModelError(
                f"GGUF tensor {tensor.name!r}: shape {found}, the metadata say {shapes[name]}; "
                "take another file"
            )
    return (_convert(by_name[name], name, shapes[name], config) for name in sorted(shapes))


def _convert(tensor: Any, name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Bf16Tensor:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    if name.endswith("q_proj.weight"):
        weight = unpermute_rows(weight, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        weight = unpermute_rows(weight, config["num_key_value_heads"])
    return Bf16Tensor(name, shape, round_to_bf16(weight))
