"""What layers keep, by kind: worked examples, each with its arithmetic."""

import pytest
from kvscaler.models import LayerKind, ModelArchitecture, ModelNotUnderstood, catalogue
from kvscaler.models.kv_formats import kv_format, layer_token_bytes, state_bytes

PLAIN = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def kinds(model):
    return [(group.kind.value, group.layers) for group in model.groups]


def read(**changes):
    return ModelArchitecture.from_config(PLAIN | changes)


def test_grouped_and_multi_query_attention():
    assert read(model_type="llama").kv_bytes_per_token("bf16") == 2 * 24 * 4 * 128 * 2
    single = {
        "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576,
        "vocab_size": 49152, "n_positions": 8192, "multi_query": True,
    }  # fmt: skip
    starcoder = ModelArchitecture.from_config(single)
    assert starcoder.kv_heads == 1
    assert starcoder.kv_bytes_per_token("bf16") == 2 * 40 * 1 * 128 * 2
    assert starcoder.parameters == pytest.approx(15.5e9, rel=0.01)


def test_windows_alternate_or_come_with_a_period():
    gemma2 = read(model_type="gemma2", sliding_window=4096)
    assert kinds(gemma2) == [("full", 12), ("sliding", 12)]
    gemma3 = read(model_type="gemma3_text", sliding_window=512)  # each sixth layer is full
    assert kinds(gemma3) == [("full", 4), ("sliding", 20)]
    assert gemma3.groups[1].window_tokens == 512
    listed = read(
        model_type="gpt_oss",
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
    )
    assert kinds(listed) == [("full", 12), ("sliding", 12)]


def test_a_window_that_is_switched_off_or_starts_late():
    assert kinds(read(model_type="qwen2", sliding_window=4096, use_sliding_window=False)) == [
        ("full", 24)
    ]
    late = read(
        model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=20
    )
    assert kinds(late) == [("full", 20), ("sliding", 4)]
    assert kinds(read(model_type="mistral", sliding_window=4096)) == [("sliding", 24)]
    assert kinds(read(model_type="mistral", sliding_window=None)) == [("full", 24)]


def test_global_layers_of_gemma_4_have_other_heads_and_the_last_share_a_cache():
    model = read(
        model_type="gemma4_text",
        num_hidden_layers=42,
        sliding_window=512,
        layer_types="sliding_attention*35,full_attention*7",
        global_head_dim=256,
        num_global_key_value_heads=2,
        num_kv_shared_layers=18,
    )
    # 18 of 42 layers own no cache: 4 of 7 full and 20 of 35 windowed ones remain.
    assert kinds(model) == [("full", 4), ("sliding", 20)]
    assert (model.groups[0].kv_heads, model.groups[0].key_dim) == (2, 256)
    assert (model.groups[1].kv_heads, model.groups[1].key_dim) == (4, 128)


def test_latent_attention_keeps_one_vector_whatever_the_heads_and_ranks():
    deepseek = catalogue.find("deepseek-v3").architecture
    group = deepseek.groups[0]
    assert group.kind is LayerKind.MLA
    assert deepseek.kv_bytes_per_token("bf16") == 61 * (512 + 64) * 2 == 70272
    for ranks in (1, 8, 32):
        assert layer_token_bytes(group, kv_format("bf16"), ranks) == 1152
    assert layer_token_bytes(group, kv_format("fp8_ds_mla")) == 656
    sparse = catalogue.find("deepseek-v3.2").architecture
    # An index key of 128 fp8 values and a 4-byte scale in each layer besides.
    assert sparse.kv_bytes_per_token("bf16") == 70272 + 61 * 132


def test_gated_delta_net_keeps_a_state_and_each_fourth_layer_tokens():
    qwen = catalogue.find("qwen3.5-27b").architecture
    assert kinds(qwen) == [("full", 16), ("recurrent", 48)]
    state = qwen.groups[1]
    # Convolution: (2 x 16 x 128 + 48 x 128) channels x 3 inputs x 2 B; recurrence: 48 x 128 x 128 x 4 B.
    assert state_bytes(state, 2) == 10240 * 3 * 2 + 48 * 128 * 128 * 4
    assert state_bytes(state, 2, tensor_parallel=4) == (10240 // 4) * 3 * 2 + 12 * 128 * 128 * 4
    assert state_bytes(state, 2, speculative_tokens=3) == 10240 * 6 * 2 + 48 * 128 * 128 * 4
    assert layer_token_bytes(state, kv_format("bf16")) == 0


def test_kimi_delta_attention_beside_latents():
    # moonshotai/Kimi-Linear-48B-A3B-Instruct, config.json.
    every_fourth = [4, 8, 12, 16, 20, 24, 27]
    config = {
        "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
        "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "vocab_size": 163840,
        "model_max_length": 1048576, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": every_fourth,
            "kda_layers": [n for n in range(1, 28) if n not in every_fourth],
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    model = ModelArchitecture.from_config(config)
    assert kinds(model) == [("mla", 7), ("recurrent", 20)]
    assert model.kv_bytes_per_token("bf16") == 7 * (512 + 64) * 2
    # Three convolutions of 32 x 128 channels x 3 inputs x 2 B; a state of 32 x 128 x 128 x 4 B.
    assert state_bytes(model.groups[1], 2) == 3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4
    assert state_bytes(model.groups[1], 2, tensor_parallel=8) == (
        3 * 512 * 3 * 2 + 4 * 128 * 128 * 4
    )
    assert model.parameters == pytest.approx(49.1e9, rel=0.01)
    assert model.experts_per_token == 8
    listed = catalogue.find("kimi-linear-48b-a3b").architecture
    assert (listed.groups, listed.parameters) == (model.groups, model.parameters)
    assert model.rotary_dim == 0  # positions come from the recurrent layers alone
    again = ModelArchitecture.from_config(dict(model.facts))
    assert (again.groups, again.parameters) == (model.groups, model.parameters)
    incomplete = {**config["linear_attn_config"], "kda_layers": [1, 2]}
    with pytest.raises(ModelNotUnderstood, match="layer_types names 'unknown'"):
        ModelArchitecture.from_config(config | {"linear_attn_config": incomplete})
    with pytest.raises(ModelNotUnderstood, match="routed_expert_hidden_size"):
        ModelArchitecture.from_config(config | {"routed_expert_hidden_size": 3072})


def test_mamba_hybrids_by_letters_and_by_period():
    nemotron = catalogue.find("nemotron-3-nano-30b-a3b").architecture
    assert kinds(nemotron) == [("full", 6), ("recurrent", 23)]
    # (64 x 64 + 2 x 8 x 128) channels x 3 x 2 B, and 64 x 64 x 128 x 4 B.
    assert state_bytes(nemotron.groups[1], 2) == 6144 * 3 * 2 + 64 * 64 * 128 * 4
    assert nemotron.parameters == pytest.approx(31.6e9, rel=0.01)
    jamba = read(
        model_type="jamba", num_hidden_layers=32, hidden_size=4096, head_dim=128,
        intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=65536,
        num_experts=16, num_experts_per_tok=2, mamba_dt_rank=256,
    )  # fmt: skip
    assert kinds(jamba) == [("full", 4), ("recurrent", 28)]
    assert jamba.parameters == pytest.approx(51.6e9, rel=0.01)


def test_cross_attention_keeps_a_fixed_state_of_the_image():
    mllama = read(model_type="mllama", cross_attention_layers=[3, 8, 13, 18])
    assert kinds(mllama) == [("full", 20), ("recurrent", 4)]
    assert mllama.groups[1].state.ssm_elements == 6404 * 4 * 2 * 128


def test_chunked_attention_of_llama_4():
    scout = catalogue.find("llama-4-scout").architecture
    assert kinds(scout) == [("full", 12), ("chunked", 36)]
    assert scout.groups[1].window_tokens == 8192


def test_layers_with_their_own_heads():
    blocks = [
        {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ]
    model = read(
        model_type="nemotron-nas", num_hidden_layers=3, num_key_value_heads=None,
        block_configs=blocks,
    )  # fmt: skip
    assert [(g.layers, g.kv_heads) for g in model.groups] == [(1, 4), (1, 2)]
    assert model.kv_bytes_per_token("bf16") == 2 * (4 + 2) * 128 * 2


def test_compressed_latents_of_deepseek_v4():
    config = {
        "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 129280,
        "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "q_lora_rank": 1024,
        "qk_rope_head_dim": 64, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "n_shared_experts": 1, "index_head_dim": 128, "index_n_heads": 64, "sliding_window": 128,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    }  # fmt: skip
    model = ModelArchitecture.from_config(config)
    found = [(g.kind.value, g.layers, g.tokens_per_state) for g in model.groups]
    assert found == [("mla", 21, 4), ("mla", 20, 128), ("sliding", 43, 1)]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Totals on the model pages (the safetensors indexes), vision towers included.
        ("qwen3-0.6b", 0.596), ("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09),
        ("mixtral-8x7b", 46.70), ("gemma-2-9b", 9.24), ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83), ("deepseek-v3", 671.03), ("kimi-k2", 1026.4),
        ("llama-3.2-1b", 1.236), ("qwen2.5-72b", 72.71),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_real_models(name, billions):
    parameters = catalogue.find(name).architecture.parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda entry: entry.name)
def test_facts_of_every_entry_read_back_to_the_same_model(entry):
    again = ModelArchitecture.from_config(dict(entry.architecture.facts))
    assert again.groups == entry.architecture.groups
    assert again.parameters == entry.architecture.parameters
    assert again.digest == entry.architecture.digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma4_text", "sliding_window": 512}, "no layer_types say which"),
        ({"model_type": "gpt_oss", "layer_types": ["odd"] * 24}, "'odd'.*not known"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 3}, "lists 3 layers"),
        (
            {"model_type": "gpt_oss", "layer_types": ["sliding_attention"] * 24},
            "sliding_window is missing",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "has other letters"),
        ({"model_type": "nemotron-nas"}, "block_configs is missing"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"model_type": "llama", "num_local_experts": 8}, "no experts are known of llama"),
    ],
)
def test_what_is_missing_or_strange_is_named(change, words):
    with pytest.raises(ModelNotUnderstood, match=words):
        read(**change)


def test_wrappers_are_opened_and_overrides_are_shown():
    wrapped = {"model_type": "gemma3", "text_config": PLAIN | {"model_type": "gemma3_text"}}
    # Without a sliding_window of its own it has that of its configuration class.
    assert kinds(ModelArchitecture.from_config(wrapped)) == [("full", 4), ("sliding", 20)]
    model = ModelArchitecture.from_config(
        PLAIN | {"model_type": "unheard-of"}, {"model_type": "llama"}
    )
    assert model.model_type == "llama"
    assert model.overrides == ("model_type",)
