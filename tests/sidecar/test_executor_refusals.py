"""What executor Torch refuses, each with the object, the cause and the next step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, StepPlan
from kvscaler.models import ModelNotUnderstood
from kvscaler_sidecar.executors.dtype import ComputeDtype, choose_compute_dtype
from kvscaler_sidecar.executors.plan_check import ExecutorError
from kvscaler_sidecar.executors.torch_cpu import Torch, TorchSettings
from kvscaler_sidecar.loader import TorchLoader
from kvscaler_sidecar.weights.llama import WeightsError
from kvscaler_sidecar.weights.llama_config import LlamaConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from tests.sidecar.replicas import settings_for

SETTINGS = TorchSettings(
    block_tokens=4,
    step_tokens=16,
    max_sequences=4,
    max_context_tokens=32,
    compute=ComputeDtype(torch.float32, "test"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ReferenceConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def plan_of(start: int, length: int, blocks: int) -> StepPlan:
    request = EngineRequest.from_prompt("r", [1] * (start + length), 1, 0.0)
    request.block_table = list(range(blocks))
    return StepPlan((Chunk(request, start, length, True),))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(0, 17, 8), "17 tokens exceeds the 16"),
        (plan_of(24, 9, 9), "33 tokens exceed the context of 32"),
        (plan_of(0, 9, 2), "no block for token 8"),
        (plan_of(0, 4, 1), r"call add\(\) first"),
    ],
)
def test_plan_beyond_what_was_allocated(folder: Path, plan: StepPlan, words: str) -> None:
    executor = Torch.load(folder, SETTINGS)
    executor.allocate(10)
    with pytest.raises(ExecutorError, match=words):
        executor.execute(plan)


def test_pool_is_made_once(folder: Path) -> None:
    executor = Torch.load(folder, SETTINGS)
    with pytest.raises(ExecutorError, match="at least one"):
        executor.allocate(0)
    executor.allocate(3)
    with pytest.raises(ExecutorError, match="has 3 blocks"):
        executor.allocate(3)


def test_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Torch.load(folder, SETTINGS)


def test_tensor_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(17)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \[17\].*says \[16\]"):
        Torch.load(folder, SETTINGS)


def test_file_that_was_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="can't be read"):
        Torch.load(folder, SETTINGS)


def test_several_files_by_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = Torch.load(folder, SETTINGS).weight_bytes
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert Torch.load(folder, SETTINGS).weight_bytes == whole
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        Torch.load(folder, SETTINGS)


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of head_dim"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_architecture_that_is_not_computed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelNotUnderstood, match=words):
        LlamaConfig.from_config(CONFIG | change)


def test_config_that_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotUnderstood, match="can't be read"):
        LlamaConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotUnderstood, match="no JSON object"):
        LlamaConfig.read(tmp_path)


def test_compute_dtype_is_chosen_with_a_reason_unless_one_is_asked_for(tmp_path: Path) -> None:
    chosen = choose_compute_dtype()
    assert chosen.name in {"float32", "bfloat16"}
    assert "CPU" in chosen.reason or "timed" in chosen.reason
    for wanted in ("float32", "bfloat16"):
        assert choose_compute_dtype(wanted).name == wanted
    settings = settings_for(tmp_path, compute_dtype="bfloat16", threads=1)
    assert TorchLoader.for_machine(settings).compute_dtype == "bfloat16"
    with pytest.raises(ValueError, match="'int4'"):
        choose_compute_dtype("int4")


def test_slow_bf16_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "kvscaler_sidecar.executors.dtype"
    monkeypatch.setattr(f"{module}._bf16_feature", lambda: "AMX")
    times = {torch.float32: 1e-3, torch.bfloat16: 5e-3}
    monkeypatch.setattr(f"{module}._product_seconds", times.__getitem__)
    assert choose_compute_dtype().dtype == torch.float32
    times[torch.bfloat16] = 4e-4
    assert choose_compute_dtype().reason == (
        "AMX; a timed matrix product took 0.40 ms in bf16, 1.00 in fp32"
    )
