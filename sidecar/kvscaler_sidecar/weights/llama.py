"""Llama-type weights from a Hugging Face folder, laid out as the executor wants to read them.

Matrices that meet the same input are one matrix (q, k, v; gate and up), so that a step makes four
products a layer. Rows of q and k heads are reordered so that the two numbers which rotary
embedding turns together are neighbours: a rotation is then one complex multiplication, and
attention does not notice, because q and k are reordered alike.

A layer's matrices are packed for their products (see `projection`). Head and embedding may be one
tensor, of which both read: it stays `[inputs, outputs]`, as a step multiplies it. In fp32 it lies in
memory that way too: with the file's order, `[outputs, inputs]`, the library's products of a few rows
(a decode step of 4 to 16 sequences) take up to twice as long. In bf16, products reorder anyway, so
the file's order stays.

Each tensor is converted straight from the mapped file: beside the weights themselves, loading needs
one matrix's worth of memory.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvscaler_sidecar.weights.llama_config import LlamaConfig
from kvscaler_sidecar.weights.projection import Projection, projection


class WeightsError(Exception):
    """Weight files are missing, damaged or of another shape; the words name file and tensor."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer. `h` hidden, `q` query heads x head_dim, `k` KV heads x head_dim, `i` inner."""

    attention_norm: torch.Tensor  # [h]
    qkv: Projection  # [h, q + 2k]
    output: Projection  # [q, h]
    mlp_norm: torch.Tensor  # [h]
    gate_up: Projection  # [h, 2i]
    down: Projection  # [i, h]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights, in the compute dtype. Tied embeddings: two views of one tensor."""

    embedding: torch.Tensor  # [vocabulary, h]
    layers: tuple[LlamaLayer, ...]
    norm: torch.Tensor  # [h]
    head: torch.Tensor  # [h, vocabulary]

    @property
    def nbytes(self) -> int:
        """Bytes counted from the tensors, a shared one once."""
        tensors = [self.embedding, self.norm, self.head]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        parts = (getattr(layer, f.name) for layer in self.layers for f in fields(layer))
        return sum(storages.values()) + sum(int(part.nbytes) for part in parts)


def load_llama(
    folder: Path, config: LlamaConfig, dtype: torch.dtype, device: str = "cpu"
) -> LlamaWeights:
    """Read `model.safetensors`, or the files of `model.safetensors.index.json`, from `folder`.

    Raises:
        WeightsError: a file or tensor is missing, damaged or of an unexpected shape.
    """
    with _open_files(folder) as files:
        hidden, inner, vocabulary = (
            config.hidden_size,
            config.intermediate_size,
            config.vocab_size,
        )
        q_width = config.attention_heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        largest = hidden * max(q_width + 2 * kv_width, 2 * inner)
        scratch = torch.empty(largest, dtype=dtype, device=device)
        source = _Source(folder, files, dtype, device, scratch)
        layers = []
        for number in range(config.layers):
            name = f"model.layers.{number}"
            attention, mlp = f"{name}.self_attn", f"{name}.mlp"
            layers.append(
                LlamaLayer(
                    attention_norm=source.vector(f"{name}.input_layernorm.weight", hidden),
                    qkv=source.projection(
                        hidden,
                        _Part(f"{attention}.q_proj.weight", q_width, config.head_dim),
                        _Part(f"{attention}.k_proj.weight", kv_width, config.head_dim),
                        _Part(f"{attention}.v_proj.weight", kv_width),
                    ),
                    output=source.projection(q_width, _Part(f"{attention}.o_proj.weight", hidden)),
                    mlp_norm=source.vector(f"{name}.post_attention_layernorm.weight", hidden),
                    gate_up=source.projection(
                        hidden,
                        _Part(f"{mlp}.gate_proj.weight", inner),
                        _Part(f"{mlp}.up_proj.weight", inner),
                    ),
                    down=source.projection(inner, _Part(f"{mlp}.down_proj.weight", hidden)),
                )
            )
        norm = source.vector("model.norm.weight", hidden)
        if config.tied_embeddings:
            head = source.head("model.embed_tokens.weight", hidden, vocabulary)
            embedding = head.t()
        else:
            head = source.head("lm_head.weight", hidden, vocabulary)
            embedding = source.empty(vocabulary, hidden)
            source.copy("model.embed_tokens.weight", embedding)
        return LlamaWeights(embedding, tuple(layers), norm, head)


def rotary_order(head_dim: int) -> torch.Tensor:
    """Row order within a head that puts rotated pairs side by side: 0, d/2, 1, d/2 + 1, …"""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


@contextmanager
def _open_files(folder: Path) -> Iterator[dict[str, Any]]:
    """Each tensor's name with the open (mapped) file that holds it."""
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    with ExitStack() as stack:
        try:
            if not paths[0].is_file() and index.is_file():
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                paths = [folder / name for name in sorted(set(names))]
            files: dict[str, Any] = {}
            for path in paths:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                files.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise WeightsError(
                f"weights in {folder} can't be read: {error}; the folder needs a complete "
                "model.safetensors, or model.safetensors.index.json and all files that it names"
            ) from error
        yield files


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a projection: a tensor of the file. `rotated_head_dim`: its heads are rotated."""

    name: str
    outputs: int
    rotated_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    folder: Path
    files: dict[str, Any]
    dtype: torch.dtype
    device: str
    scratch: torch.Tensor
    """Flat, for the largest matrix: one for all, since what is freed between matrices that stay
    leaves holes in the heap that nothing fits."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def vector(self, name: str, size: int) -> torch.Tensor:
        target = self.empty(size)
        self.copy(name, target)
        return target

    def projection(self, inputs: int, *parts: "_Part") -> Projection:
        """One matrix of the rows of several tensors that meet the same input."""
        outputs = sum(part.outputs for part in parts)
        whole = self.scratch[: outputs * inputs].view(outputs, inputs)
        for part, rows in zip(parts, torch.split(whole, [p.outputs for p in parts]), strict=True):
            self.copy(part.name, rows, part.rotated_head_dim)
        return projection(whole)

    def head(self, name: str, inputs: int, outputs: int) -> torch.Tensor:
        wide = self.dtype == torch.float32
        target = self.empty(inputs, outputs) if wide else self.empty(outputs, inputs).t()
        self.copy(name, target.t())
        return target

    def copy(self, name: str, target: torch.Tensor, rotated_head_dim: int | None = None) -> None:
        """Fill `target`, in the file's order, from tensor `name`."""
        file = self.files.get(name)
        if file is None:
            raise WeightsError(f"weights in {self.folder} have no tensor {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.shape != target.shape:
            raise WeightsError(
                f"weights in {self.folder}: {name} is {list(tensor.shape)}, but config.json "
                f"says {list(target.shape)}"
            )
        if rotated_head_dim is not None:
            heads = tensor.view(-1, rotated_head_dim, tensor.shape[-1])
            tensor = heads[:, rotary_order(rotated_head_dim)].view_as(tensor)
        target.copy_(tensor)
