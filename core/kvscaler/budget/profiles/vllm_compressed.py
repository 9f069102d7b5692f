"""How vLLM lays out DeepSeek V4: compressed latents, windows of latents, and compressor states.

Pages of several sizes are packed into one block, as wide as the widest group. Sources: vLLM
`models/deepseek_v4/attention.py` and `compressor.py` (pages of 584 bytes a latent, states in 32 bits in
blocks of 4 and 8 tokens, 576-byte alignment) and `v1/core/kv_cache_utils.py`,
`_get_packed_kv_cache_groups`.
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.rounding import ceil_div, round_up
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.models import LayerGroup, LayerKind, ModelArchitecture
from kvscaler.models.kv_formats import index_token_bytes

BLOCK_TOKENS = 256
LATENT_BYTES = 584
"""448 fp8 values, 64 bf16 rotary values and 8 bytes of scales."""
ALIGNMENT = 576
WINDOW_BLOCK_TOKENS = 64
STATE_BLOCK_TOKENS = {4: 4, 128: 8}
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one block table: pages by size and count."""

    kind: LayerKind
    block_tokens: int
    window_tokens: int | None
    pages: tuple[tuple[int, int], ...]
    """`(page bytes, layers)`."""

    @property
    def repeats(self) -> int:
        return max(layers for _, layers in self.pages)

    @property
    def balanced(self) -> bool:
        return len({layers for _, layers in self.pages}) == 1

    def widest(self, groups: int) -> int:
        return sum(size * ceil_div(layers, groups) for size, layers in self.pages)


def compressed_layout(model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
    """Blocks of one rank; one shared key-value head is on every rank."""
    buckets = _buckets(model)
    floor = max((b.repeats for b in buckets if b.balanced and len(b.pages) > 1), default=0)
    per_group = _repeats_per_group([b.repeats for b in buckets if b.balanced], floor)
    numbers = [ceil_div(b.repeats, per_group) if b.balanced and per_group else 1 for b in buckets]
    block_bytes = max(b.widest(n) for b, n in zip(buckets, numbers, strict=True))
    groups = tuple(
        PoolGroup(b.kind, ceil_div(b.repeats, number), b.block_tokens, b.window_tokens)
        for b, number in zip(buckets, numbers, strict=True)
        for _ in range(number)
    )
    return PoolLayout(groups, block_bytes, settings.step_tokens)


def _buckets(model: ModelArchitecture) -> list[_Bucket]:
    latents: list[tuple[int, int]] = []
    states: dict[int, list[tuple[int, int]]] = {}
    windows: list[_Bucket] = []
    for group in model.groups:
        if group.kind is LayerKind.SLIDING:
            page = round_up(WINDOW_BLOCK_TOKENS * LATENT_BYTES, ALIGNMENT)
            pages = ((page, group.layers),)
            windows.append(
                _Bucket(LayerKind.SLIDING, WINDOW_BLOCK_TOKENS, group.window_tokens, pages)
            )
            continue
        ratio = group.tokens_per_state
        held = BLOCK_TOKENS // ratio
        latents.append((round_up(held * LATENT_BYTES, ALIGNMENT), group.layers))
        states.setdefault(ratio, []).append((_state_page(group.key_dim, ratio), group.layers))
        if group.index_layers:
            index = round_up(held * index_token_bytes(group), ALIGNMENT)
            latents.append((index, group.index_layers))
            states[ratio].append((_state_page(group.index_dim, ratio), group.index_layers))
    found = [_Bucket(LayerKind.MLA, BLOCK_TOKENS, None, tuple(latents)), *windows]
    for ratio, sized in states.items():
        overlap = 2 if ratio == 4 else 1
        found.append(_Bucket(LayerKind.SLIDING, _state_block(ratio), overlap * ratio, tuple(sized)))
    return found


def _state_block(ratio: int) -> int:
    return STATE_BLOCK_TOKENS.get(ratio, 8)


def _state_page(width: int, ratio: int) -> int:
    """Key and score states of a compressor, twice where windows of it overlap."""
    overlap = 2 if ratio == 4 else 1
    return round_up(_state_block(ratio) * 2 * overlap * width * FLOAT_BYTES, ALIGNMENT)


def _repeats_per_group(repeats: list[int], floor: int) -> int:
    """The group size of at least `floor` that pads least, the larger of equals."""
    if not floor:
        return 0

    def padding(size: int) -> int:
        return sum(-count % size for count in repeats)

    return min(range(floor, max(repeats) + 1), key=lambda size: (padding(size), -size))


def is_compressed(groups: tuple[LayerGroup, ...]) -> bool:
    """Whether any layer keeps one latent for several tokens."""
    return any(group.tokens_per_state > 1 for group in groups)
