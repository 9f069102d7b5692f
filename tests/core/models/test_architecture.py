"""Model facts: KV bytes and parameters as engines print them, and refusal of what is unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.models import (
    ModelArchitecture,
    ModelNotUnderstood,
    UnknownModel,
    canonical_dtype,
    catalogue,
)

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "kv_bytes"),
    [
        # Parameter totals are those of the models' safetensors indexes on their model pages;
        # bytes a token those of vLLM's start-up logs (github.com/vllm-project/vllm issue 10517,
        # docs.lmcache.ai/getting_started/faq.html, vllm_server.log at amdgoose/arno_vllm_chat).
        (LLAMA_8B, 8_030_261_248, 131_072),
        (QWEN3_8B, 8_190_735_360, 147_456),
        (QWEN25_7B, 7_615_616_512, 57_344),
    ],
)
def test_parameters_and_kv_bytes_are_those_of_the_real_models(config, parameters, kv_bytes):
    model = ModelArchitecture.from_config(config)
    assert model.parameters == parameters
    assert model.kv_bytes_per_token("bfloat16") == kv_bytes


def test_catalogue_finds_by_name_uri_and_revision():
    entry = catalogue.find("hf://meta-llama/Llama-3.1-8B-Instruct@main")
    assert entry.name == "llama-3.1-8b"
    assert catalogue.find("builtin://smollm2-135m").architecture.parameters == 134_515_008
    assert all(e.source.startswith("https://") for e in catalogue.entries())


def test_unknown_model_names_what_is_known_and_the_way_out():
    with pytest.raises(UnknownModel, match=r"'hf://nobody/nothing'.*llama-3\.1-8b.*inline"):
        catalogue.find("hf://nobody/nothing")


def test_facts_round_trip_to_the_same_architecture():
    model = ModelArchitecture.from_config(LLAMA_8B)
    again = ModelArchitecture.from_config(dict(model.facts))
    assert again == model
    assert again.digest == model.digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2'"),
        ({"model_type": None}, "model_type 'is missing'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 5}, "no multiple of key-value heads 5"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "int3"}, "'int3' is not known"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, words):
    with pytest.raises(ModelNotUnderstood, match=words):
        ModelArchitecture.from_config(LLAMA_8B | change)


def test_all_problems_are_named_at_once():
    with pytest.raises(ModelNotUnderstood) as caught:
        ModelArchitecture.from_config({"model_type": "llama"})
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"):
        assert f"{name} is missing" in str(caught.value)


@given(
    layers=st.integers(1, 100),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
)
def test_kv_bytes_are_two_times_layers_heads_width_and_element(layers, kv_heads, group, head_dim):
    model = ModelArchitecture.from_config(
        LLAMA_8B
        | {
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * group,
            "head_dim": head_dim,
        }
    )
    assert model.kv_bytes_per_token("float32") == 2 * layers * kv_heads * head_dim * 4
    assert model.kv_bytes_per_token("bf16") * 2 == model.kv_bytes_per_token("fp32")


def test_dtype_names_of_every_habit():
    assert canonical_dtype("torch.bfloat16") == canonical_dtype("BF16") == "bfloat16"
