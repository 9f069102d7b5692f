"""Weight bytes: per quantization, per rank, exactly as engines print them where nothing is left open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.models import ModelArchitecture, ModelNotUnderstood, Split, catalogue
from kvscaler.models.quantization import parse_config, parse_name

GIB = 1 << 30
QWEN3_8B = dict(catalogue.find("qwen3-8b").architecture.facts)


@pytest.mark.parametrize(
    ("name", "bytes_per_weight"),
    [
        ("int4-g128", (4 + 16 / 128) / 8),  # one 16-bit scale per 128
        ("awq-g128", (4 + 20 / 128) / 8),  # and a 4-bit zero point
        ("int4-g32", (4 + 16 / 32) / 8),
        ("nvfp4", (4 + 8 / 16) / 8),  # one fp8 scale per 16
        ("mxfp4", (4 + 8 / 32) / 8),  # one exponent per 32
        ("fp8", 1 + 4 / 128**2),  # one fp32 scale per 128 x 128
        ("bnb-4bit", (4 + 8 / 64 + 32 / 64 / 256) / 8),
        ("gguf q8_0", 8.5008 / 8),
    ],
)
def test_scales_are_part_of_the_size(name, bytes_per_weight):
    assert parse_name(name).bytes_per_weight == pytest.approx(bytes_per_weight)
    assert parse_name(parse_name(name).name) == parse_name(name)


def test_embeddings_head_and_norms_stay_in_16_bits():
    plain = ModelArchitecture.from_config(QWEN3_8B)
    quantized = ModelArchitecture.from_config(QWEN3_8B | {"quantization": "int4-g128"})
    kept = sum(k.elements for k in plain.tensors if not k.linear or k.name == "head")
    rest = plain.parameters - kept
    assert kept >= 2 * 151936 * 4096
    expected = kept * 2 + rest * 0.515625
    assert quantized.weight_bytes("bf16") == pytest.approx(expected, rel=1e-6)


def test_modules_that_a_checkpoint_skips_stay_in_16_bits():
    block = {"quant_method": "fp8", "modules_to_not_convert": [
        "lm_head", *(f"model.layers.{i}.self_attn.q_proj" for i in range(36))]}  # fmt: skip
    whole = ModelArchitecture.from_config(QWEN3_8B | {"quantization": "fp8"})
    skipping = ModelArchitecture.from_config(QWEN3_8B | {"quantization_config": block})
    query = whole.tensor("query").elements
    assert skipping.weight_bytes("bf16") - whole.weight_bytes("bf16") == pytest.approx(
        query * (1 - 4 / 128**2), rel=1e-6
    )
    assert skipping.facts["quantization_skips"] == "lm_head;layers.#.self_attn.q_proj"


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq-g128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "awq-g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-8bit"),
        ({"quant_algo": "NVFP4"}, "nvfp4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
                "num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}}},
            "int4-g32",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
                "num_bits": 8, "type": "float"}}}},
            "fp8",
        ),
    ],
)  # fmt: skip
def test_quantization_blocks_of_common_tools(block, name):
    assert parse_config(block).name == name


@pytest.mark.parametrize(
    "block",
    [{"quant_method": "aqlm"}, {"quant_method": "awq", "bits": 5}, {"quant_method": "awq",
     "group_size": "big"}, {"quant_method": "compressed-tensors", "config_groups": []}, {}],
)  # fmt: skip
def test_unknown_schemes_are_refused(block):
    with pytest.raises(ModelNotUnderstood):
        parse_config(block)


@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "gib"),
    [
        # "model weights take" of start-up logs, less the table of angles: Llama-3.1-70B at tp 8
        # (vllm_hybrid, eval/results), Llama-3.1-8B at tp 2 and 4 (MapCoder, vllm.log).
        ("llama-3.1-70b", "bf16", 8, 16.43),
        ("llama-3.1-8b", "bf16", 2, 7.48),
        ("llama-3.1-8b", "bf16", 4, 3.74),
        ("qwen3-0.6b", "bf16", 1, 1.11),
        ("qwen3-32b", "bf16", 1, 61.02),
    ],
)
def test_ranks_hold_what_logs_say(name, dtype, ranks, gib):
    model = catalogue.find(name).architecture
    assert model.rank_weight_bytes(dtype, Split(ranks)) / GIB == pytest.approx(gib, abs=0.01)


@given(
    name=st.sampled_from([entry.name for entry in catalogue.entries()]),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    stages=st.sampled_from([1, 2, 4]),
)
def test_more_ranks_never_hold_more_each_and_together_hold_it_all(name, ranks, stages):
    model = catalogue.find(name).architecture
    here = model.rank_weight_bytes("bf16", Split(ranks, stages))
    assert here <= model.rank_weight_bytes("bf16", Split(max(1, ranks // 2), stages))
    assert here <= model.rank_weight_bytes("bf16", Split(ranks, max(1, stages // 2)))
    assert here * ranks * stages >= 0.999 * model.weight_bytes("bf16")


def test_prediction_layers_are_loaded_only_when_they_speculate():
    model = catalogue.find("deepseek-v3").architecture
    more = model.rank_weight_bytes("bf16", draft=True) - model.rank_weight_bytes("bf16")
    assert more / 1e9 == pytest.approx(11.6, rel=0.05)  # 11.6 billion parameters in fp8 or bf16


def test_data_parallel_engines_share_the_experts_and_nothing_else():
    model = catalogue.find("deepseek-v3").architecture
    alone = model.rank_weight_bytes("bf16")
    shared = model.rank_weight_bytes("bf16", Split(experts=8))
    experts = model.rank_expert_bytes("bf16", 1)
    assert alone - shared == pytest.approx(experts * 7 / 8, rel=1e-6)
