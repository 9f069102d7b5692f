"""The bundled SmolLM2-135M as converted, against transformers' own reading of the same GGUF."""

from pathlib import Path

import pytest
import torch
from kvscaler_sidecar.weights import builtin, convert
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    return builtin.ensure("builtin://smollm2-135m")


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    return convert.find_gguf(builtin.parse_uri("smollm2-135m"))


def test_the_configuration_is_the_published_one(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (
        576,
        30,
        1536,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.dtype == torch.bfloat16


def test_every_tensor_equals_what_transformers_reads(folder: Path, gguf_file: Path) -> None:
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=skeleton)[
        "tensors"
    ]
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(theirs)
    different = [
        name
        for name, tensor in ours.items()
        if not torch.equal(tensor, torch.as_tensor(theirs[name]).to(torch.bfloat16))
    ]
    assert different == []


def test_the_tokenizer_equals_the_one_of_transformers(folder: Path, gguf_file: Path) -> None:
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    texts = [
        "Hello world, it's 3.14!",
        "<|im_start|>user\nhi there<|im_end|>\n",
        "日本語 naïve  café\t\n\n  x",
        "def f(x):\n    return x ** 2 + 10",
        " lead and trail  ",
        "🙂 ﷽ e\u0301",
    ]
    for text in texts:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_numbers_of_any_script_are_cut_digit_by_digit(folder: Path) -> None:
    # transformers' generic GGUF tokenizer has no such rule; llama.cpp's "smollm" has: \p{N}.
    pieces = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in pieces.pre_tokenize_str("a2024 ٣٤")] == [
        *"a2024",
        "Ġ",
        "Ù£",
        "Ù¤",
    ]


def test_the_model_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    logits = model(**prompt).logits[0, -1]
    assert tokenizer.decode(int(logits.argmax())) == " Paris"
