"""Model facts from files: a `config.json`, a folder with one, or a GGUF file.

A folder tells more than its configuration: an index of safetensors the exact bytes of the weights, and
`hf_quant_config.json` a quantization that the configuration leaves out. Files are bounded before they are
read, for they may come from anyone.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvscaler.models.architecture import ModelArchitecture
from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.gguf import read_gguf

LARGEST_CONFIG_BYTES = 8 << 20
LARGEST_INDEX_BYTES = 64 << 20
LARGEST_HEADER_BYTES = 100 << 20
"""safetensors' own limit for a header."""


def read_model(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelArchitecture:
    """The model at `path`. Raises `ModelNotUnderstood` naming the file and what is wrong with it."""
    if path.suffix.lower() == ".gguf":
        header = read_gguf(path)
        model = ModelArchitecture.from_config(header.config, overrides)
        return replace(model, stored_bytes=header.tensor_bytes)
    folder = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, LARGEST_CONFIG_BYTES)
    if path.is_dir():
        config = _with_quantization(folder, config)
    try:
        model = ModelArchitecture.from_config(config, overrides)
    except ModelNotUnderstood as error:
        raise ModelNotUnderstood(f"{file}: {error}") from error
    stored = stored_bytes(folder) if path.is_dir() else None
    return model if stored is None else replace(model, stored_bytes=stored)


def read_json(file: Path, largest: int) -> dict[str, Any]:
    """The object in `file`, which may hold at most `largest` bytes."""
    try:
        size = file.stat().st_size
        if size > largest:
            raise ModelNotUnderstood(
                f"{file} has {size:,} bytes; a file of its kind has at most {largest:,}"
            )
        found = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ModelNotUnderstood(f"{file} is nested too deep to be read") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ModelNotUnderstood):
            raise
        raise ModelNotUnderstood(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelNotUnderstood(f"{file} holds a {type(found).__name__}, not an object")
    return found


def _with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt writes its scheme beside the configuration."""
    beside = folder / "hf_quant_config.json"
    if config.get("quantization_config") or not beside.exists():
        return config
    block = read_json(beside, LARGEST_CONFIG_BYTES).get("quantization")
    if not isinstance(block, dict) or not block.get("quant_algo"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **block}}


def stored_bytes(folder: Path) -> int | None:
    """Exact bytes of the weights in `folder` by their safetensors index or headers, else `None`."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        metadata = read_json(index, LARGEST_INDEX_BYTES).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if (
            isinstance(total, bool)
            or not isinstance(total, (int, float))
            or not 0 < total < 1 << 60
        ):
            raise ModelNotUnderstood(f"{index} has no total_size in its metadata")
        return int(total)
    single = folder / "model.safetensors"
    return safetensors_bytes(single) if single.exists() else None


def safetensors_bytes(file: Path) -> int:
    """Bytes of all tensors by the header of one safetensors file."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
            if not 2 <= length <= LARGEST_HEADER_BYTES:
                raise ModelNotUnderstood(f"{file} has no safetensors header")
            header = json.loads(stream.read(length))
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        return int(max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ModelNotUnderstood):
            raise
        raise ModelNotUnderstood(f"{file} has no readable safetensors header: {error}") from error
