"""Which blocks of a prompt are computed already: a hash chain over full blocks.

A block's hash covers its tokens and, through its parent's hash, all tokens before it, the salt and
the extra keys, so that equal hashes mean equal keys and values. SHA-256 costs 40 ns a token, which
leaves no reason for a weaker hash that a client could collide on purpose. Salt and keys are in the
chain's root, and the root is fixed: replicas agree on hashes without talking.

Only full blocks are shared. The last known token is always computed again, since its logits are
wanted. Two charges are told apart and never mixed: the *KV charge* is the blocks that become newly
referenced (a hit on a cached block that nobody holds is charged, since it can't be evicted any
more; one on a block that a live request holds is not), the *prefill charge* is the tokens that
must be computed.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.request import EngineRequest


def root_hash(block_tokens: int, salt: str = "", keys: Sequence[str] = ()) -> bytes:
    """Parent of the first block: 32 bytes that differ for every block size, salt and key."""
    return hashlib.sha256(
        json.dumps(["kvscaler/prefix/1", block_tokens, salt, *keys]).encode()
    ).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash (32 bytes) of one full block: `parent` and its token ids as 32-bit little-endian."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(parent + ids.tobytes()).digest()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks of a request that the pool still holds, in order."""

    blocks: tuple[int, ...] = ()
    evictable_blocks: int = 0
    """How many of `blocks` nobody holds now: taking them is charged."""
    tokens: int = 0
    """Tokens in `blocks`: they need not be computed."""

    @property
    def live_blocks(self) -> int:
        """How many of `blocks` another live request holds: sharing them is free."""
        return len(self.blocks) - self.evictable_blocks


NO_HIT = PrefixHit()


class PrefixCache:
    """Hashes of requests and what the pool knows under them. Disabled, it never finds anything."""

    __slots__ = ("_roots", "block_tokens", "enabled", "hit_tokens", "pool", "queried_tokens")

    def __init__(self, pool: BlockPool, block_tokens: int, enabled: bool = True) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block holds at least one token, not {block_tokens}")
        self.pool = pool
        self.block_tokens = block_tokens
        self.enabled = enabled
        self.queried_tokens = 0
        """Tokens of requests that started with a look at the cache."""
        self.hit_tokens = 0
        """Of these, tokens that were found."""
        self._roots: dict[tuple[str, tuple[str, ...]], bytes] = {}

    def lookup(self, request: EngineRequest) -> PrefixHit:
        """The longest run of computed leading blocks, all but the last token at most.

        Looking changes nothing: no reference, no place in the list of evictable blocks.
        """
        if not self.enabled:
            return NO_HIT
        most = (len(request.token_ids) - 1) // self.block_tokens
        self._extend_hashes(request, most)
        find, references = self.pool.find, self.pool.references
        blocks: list[int] = []
        evictable = 0
        for digest in request.block_hashes[:most]:
            block = find(digest)
            if block is None:
                break
            blocks.append(block)
            evictable += references(block) == 0
        return PrefixHit(tuple(blocks), evictable, len(blocks) * self.block_tokens)

    def take(self, request: EngineRequest, hit: PrefixHit) -> None:
        """Start `request` (no blocks yet) on the blocks of a hit that was looked up just now."""
        self.pool.touch(hit.blocks)
        request.block_table.extend(hit.blocks)
        request.computed_tokens = request.cached_tokens = hit.tokens
        if self.enabled:
            self.queried_tokens += len(request.token_ids)
            self.hit_tokens += hit.tokens

    def publish(self, request: EngineRequest, computed_before: int) -> None:
        """Make the blocks findable that became full since `computed_before` tokens."""
        first, last = (
            computed_before // self.block_tokens,
            request.computed_tokens // self.block_tokens,
        )
        if not self.enabled or first == last:
            return
        self._extend_hashes(request, last)
        for index in range(first, last):
            self.pool.register(request.block_table[index], request.block_hashes[index])

    def _extend_hashes(self, request: EngineRequest, blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_tokens
        if len(hashes) >= blocks:
            return
        parent = hashes[-1] if hashes else self._root(request)
        for index in range(len(hashes), blocks):
            parent = block_hash(parent, request.token_ids[index * size : (index + 1) * size])
            hashes.append(parent)

    def _root(self, request: EngineRequest) -> bytes:
        # One entry only: services mostly use one salt, and a client may send any number of them.
        key = (request.cache_salt, request.cache_keys)
        if key not in self._roots:
            self._roots = {key: root_hash(self.block_tokens, *key)}
        return self._roots[key]
