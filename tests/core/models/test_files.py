"""Model facts from files: GGUF headers, safetensors indexes and folders."""

import json
import struct

import pytest
from kvscaler.models import ModelArchitecture, ModelNotUnderstood, Split, catalogue, read_model

LLAMA = dict(catalogue.find("llama-3.2-1b").architecture.facts)


def gguf(pairs, tensors):
    """A GGUF file of these fields and tensors (`name, dimensions, type`), without their data."""

    def text(value):
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
        else:
            out += struct.pack("<II", 4, value)
    for name, dimensions, kind in tensors:
        out += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", kind, 0)
    return out


FIELDS = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.feed_forward_length": 256, "llama.context_length": 512,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a"] * 64,
}  # fmt: skip


def test_a_gguf_header_gives_facts_and_exact_bytes(tmp_path):
    file = tmp_path / "tiny.gguf"
    # Q4_K: 144 bytes per 256 weights; F32: 4 bytes each.
    file.write_bytes(gguf(FIELDS, [("token_embd.weight", (64, 64), 12), ("norm", (64,), 0)]))
    model = read_model(file)
    assert model.tied_embeddings
    assert model.vocab_size == 64
    assert [(g.layers, g.kv_heads, g.key_dim) for g in model.groups] == [(2, 2, 16)]
    assert model.stored_bytes == 64 * 64 // 256 * 144 + 64 * 4
    assert model.rank_weight_bytes("float16") == pytest.approx(model.stored_bytes, rel=0.01)
    assert model.quantization is not None


def test_an_output_tensor_unties_the_head(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf(FIELDS, [("output.weight", (64, 64), 1)]))
    model = read_model(file)
    assert not model.tied_embeddings
    assert model.quantization is None


def test_an_architecture_of_llama_cpp_that_is_not_known_is_refused(tmp_path):
    file = tmp_path / "odd.gguf"
    file.write_bytes(gguf({"general.architecture": "rwkv7"}, []))
    with pytest.raises(ModelNotUnderstood, match="'rwkv7' is not one of"):
        read_model(file)


def test_an_index_gives_the_exact_bytes_of_the_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"metadata": {"total_size": 2_471_645_608}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = read_model(tmp_path)
    assert model.stored_bytes == 2_471_645_608
    assert model.rank_weight_bytes("bf16") == 2_471_645_608
    halves = model.rank_weight_bytes("bf16", Split(2))
    assert 2_471_645_608 / 2 <= halves < 2_471_645_608 * 0.51


def test_a_single_file_gives_them_by_its_header(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({
        "__metadata__": {}, "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [6], "data_offsets": [8, 20]},
    }).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_model(tmp_path).stored_bytes == 20


def test_a_quantization_beside_the_configuration_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = read_model(tmp_path)
    assert model.quantization.name == "nvfp4"
    assert model.quantization.skips == ("lm_head",)


def test_a_configuration_file_alone_is_enough(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_model(file) == ModelArchitecture.from_config(LLAMA)
