"""How vLLM cuts its KV pool into blocks: the page sizes of hybrid models, unified, and their groups.

Source: vLLM `v1/core/kv_cache_utils.py` (`unify_kv_cache_spec_page_size`,
`_get_kv_cache_groups_uniform_page_size`, `get_kv_cache_config_from_groups`) and
`platforms/interface.py` (an attention block grows until its page holds a recurrent state).
"""

from dataclasses import dataclass, replace

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.rounding import ceil_div
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.models import LayerGroup, LayerKind, ModelArchitecture, dtype_bytes
from kvscaler.models.kv_formats import (
    index_token_bytes,
    kv_format,
    layer_token_bytes,
    state_bytes,
)

GROUP_GROWTH = 1.5
"""Below this ratio of the largest to the smallest number of layers of a kind, groups take the
largest (`max_num_layers < min_num_layers * 1.5`)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one specification: `page_bytes` of one layer for `block_tokens` tokens."""

    group: LayerGroup
    layers: int
    block_tokens: int
    page_bytes: int
    used_bytes: int


def vllm_layout(
    model: ModelArchitecture, settings: ResolvedSettings, *, hybrid: bool = True
) -> PoolLayout:
    """The pool of one rank of vLLM V1; with `hybrid` false (V0) every layer keeps every token."""
    kinds = _kinds(model, settings)
    if not hybrid:
        kinds = [_as_full(kind) for kind in kinds]
    if len({_table(kind) for kind in kinds}) == 1:
        return _one_table(kinds, model, settings)
    kinds = _unified(kinds, settings)
    counts = [kind.layers for kind in kinds]
    smallest, largest = min(counts), max(counts)
    per_group = largest if largest < smallest * GROUP_GROWTH else smallest
    page = max(kind.page_bytes for kind in kinds)
    groups: list[PoolGroup] = []
    used = 0
    for kind in kinds:
        number = ceil_div(kind.layers, per_group)
        used += kind.layers * kind.used_bytes
        for index in range(number):
            layers = kind.layers // number + (1 if index < kind.layers % number else 0)
            groups.append(_pool_group(kind, layers, settings))
    padding = page * per_group - ceil_div(used, len(groups))
    return PoolLayout(tuple(groups), page * per_group, settings.step_tokens, max(0, padding))


def _table(kind: _Kind) -> tuple[LayerKind, int | None]:
    return kind.group.kind, kind.group.window_tokens


def _one_table(
    kinds: list[_Kind], model: ModelArchitecture, settings: ResolvedSettings
) -> PoolLayout:
    """Layers of one kind share one table, whatever the size of each layer's page."""
    indices = sum(
        group.index_layers * index_token_bytes(group) * settings.block_tokens
        for group in model.groups
    )
    stages = settings.pipeline_parallel
    block_bytes = sum(ceil_div(kind.layers, stages) * kind.page_bytes for kind in kinds)
    block_bytes += ceil_div(indices, stages)
    layers = sum(kind.layers for kind in kinds)
    return PoolLayout((_pool_group(kinds[0], layers, settings),), block_bytes, settings.step_tokens)


def _kinds(model: ModelArchitecture, settings: ResolvedSettings) -> list[_Kind]:
    form = kv_format(settings.kv_dtype)
    block = settings.block_tokens
    found = []
    for group in model.groups:
        layers = group.layers
        if group.kind is LayerKind.RECURRENT:
            element = dtype_bytes(settings.compute_dtype)
            state = state_bytes(
                group, element, settings.tensor_parallel, settings.speculative_tokens
            )
            found.append(_Kind(group, layers, block, state, state))
            continue
        if group.kind in (LayerKind.FULL, LayerKind.MLA) and group is model.groups[0]:
            layers += settings.draft_layers
        page = round(layer_token_bytes(group, form, settings.tensor_parallel) * block)
        found.append(_Kind(group, layers, block, page, page))
    return found


def _as_full(kind: _Kind) -> _Kind:
    """V0, and V1 with its hybrid manager off: a window saves compute, not memory."""
    if kind.group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED):
        full = replace(kind.group, kind=LayerKind.FULL, window_tokens=None)
        return replace(kind, group=full)
    return kind


def _unified(kinds: list[_Kind], settings: ResolvedSettings) -> list[_Kind]:
    """Give every kind the same page: attention blocks grow to hold a state, states are padded."""
    states = [kind for kind in kinds if kind.group.kind is LayerKind.RECURRENT]
    others = [kind for kind in kinds if kind.group.kind is not LayerKind.RECURRENT]
    if states and others:
        state = max(kind.page_bytes for kind in states)
        align = max(16, settings.block_tokens)
        per_token = max(kind.page_bytes // kind.block_tokens for kind in others)
        block = max(settings.block_tokens, align * ceil_div(state, align * per_token))
        others = [_with_block(kind, block) for kind in others]
    page = max(kind.page_bytes for kind in (*states, *others))
    unified = []
    for kind in others:
        growth = page // kind.page_bytes if page % kind.page_bytes == 0 else 1
        grown = _with_block(kind, kind.block_tokens * growth)
        unified.append(replace(grown, page_bytes=page))
    block = max((kind.block_tokens for kind in unified), default=settings.block_tokens)
    return unified + [replace(kind, page_bytes=page, block_tokens=block) for kind in states]


def _with_block(kind: _Kind, block_tokens: int) -> _Kind:
    size = kind.page_bytes // kind.block_tokens * block_tokens
    return replace(kind, block_tokens=block_tokens, page_bytes=size, used_bytes=size)


def _pool_group(kind: _Kind, layers: int, settings: ResolvedSettings) -> PoolGroup:
    fixed = 0
    tokens = kind.block_tokens
    if kind.group.kind is LayerKind.RECURRENT:
        fixed = (2 if settings.prefix_caching else 1) + settings.speculative_tokens
    elif kind.group.kind in (LayerKind.FULL, LayerKind.MLA):
        tokens *= settings.context_parallel
    return PoolGroup(kind.group.kind, layers, tokens, kind.group.window_tokens, fixed)
