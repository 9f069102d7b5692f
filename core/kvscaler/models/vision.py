"""Parameters of a vision or audio tower, which engines load beside the text model.

A transformer of `depth` layers has `4 d^2` weights of attention and two or three matrices of
feed-forward a layer; patch embedding and projector are counted from their usual shapes. The towers
are one or two percent of a model's bytes, so this is exact to a few parts in a thousand of the whole.
"""

from collections.abc import Mapping
from typing import Any

from kvscaler.models.fields import Fields

_DEPTH = ("depth", "num_hidden_layers", "num_layers", "layers", "encoder_layers")
_WIDTH = ("hidden_size", "embed_dim", "width", "d_model")
_FFN = ("intermediate_size", "encoder_ffn_dim")
_GATED = ("pixtral", "qwen2_5_vl", "gemma4_vision")


def vision_parameters(fields: Fields) -> int:
    """Parameters of towers and projectors, 0 without one; faults go to `fields.problems`."""
    stated = fields.optional("vision_parameters", least=0)
    if stated is not None:
        return stated
    total = 0
    for name in ("vision_config", "audio_config"):
        tower = fields.get(name)
        if tower is None:
            continue
        if not isinstance(tower, Mapping):
            fields.problems.append(f"{name} is a {type(tower).__name__}, not an object")
            continue
        total += _tower(fields, name, tower)
    return total


def _tower(fields: Fields, name: str, config: Mapping[str, Any]) -> int:
    tower = Fields(config, {})
    if not any(tower.has(key) for key in _DEPTH) or not any(tower.has(key) for key in _WIDTH):
        return 0
    depth = tower.integer(*_DEPTH)
    width = tower.integer(*_WIDTH)
    inner = tower.integer(*_FFN, default=4 * width)
    kind = tower.text("model_type")
    matrices = 3 if kind.startswith(_GATED) else 2
    patch = tower.integer("patch_size", "spatial_patch_size", default=14)
    frames = tower.integer("temporal_patch_size", default=1)
    channels = tower.integer("in_channels", "num_channels", "in_chans", default=3)
    total = depth * (4 * width * width + matrices * width * inner)
    total += width * patch * patch * frames * channels
    total += _positions(tower, patch) * width
    total += _projector(tower, fields, width)
    fields.problems += [f"{name}.{problem}" for problem in tower.problems]
    return total


def _positions(tower: Fields, patch: int) -> int:
    if tower.has("num_position_embeddings"):
        return tower.integer("num_position_embeddings")
    if tower.has("image_size") and isinstance(tower.get("image_size"), int):
        return (tower.integer("image_size") // patch) ** 2 + 1
    return 0


def _projector(tower: Fields, fields: Fields, width: int) -> int:
    """Merged patches go through two matrices to the text model's width."""
    merge = tower.integer("spatial_merge_size", default=1)
    merged = width * merge * merge
    hidden = fields.integer("hidden_size")
    out = tower.integer("out_hidden_size", default=hidden)
    mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
    middle = merged if merge > 1 else out
    return mergers * (merged * middle + middle * out)
