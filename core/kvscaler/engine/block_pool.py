"""Which KV block belongs to whom: reference counts, free blocks, and cached ones that may go.

A block is in one of three states, and the three counts always add up to the capacity:

    blank ──get──► referenced ──free, no hash──► blank            (a stack: last out, first in)
                       │  ▲
     free, with a hash ▼  │ touch (a prefix hit, from anywhere in the list)
                     cached ──get, when no blank is left──► referenced, its old hash forgotten
                                                                  (a list: oldest first)

Together the blank stack and the cached list are one free list: blocks without a hash go to its
front and are reused first, hashed ones go to its back and are evicted oldest first. The hashed
part is an intrusive doubly linked list (links in per-block slots, one sentinel that is both ends),
because a prefix hit takes a block out of the middle in O(1); a blank block is never looked up, so
its part needs no links and is taken and given back by slices.

Callers free a sequence's blocks in reverse, so that the tail of a prefix is evicted before its
head. Blocks are numbered from 0 to capacity - 1 and each is handed out: there is no null block.
An executor that pads batches allocates one block behind the pool, number `capacity`, for writes
that must harm nobody and charges it to its scratch; reads of padding may name any block, since the
pool's memory is zeroed once and never holds a NaN.

Idea of the split free list: vLLM's `block_pool.py`.
"""

from collections.abc import Iterable, Sequence


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are available: the caller did not look first."""


class BlockPool:
    """Blocks of one replica. Every method is O(blocks named), none looks at the whole pool."""

    __slots__ = (
        "_blank",
        "_by_hash",
        "_cached",
        "_hash",
        "_newer",
        "_older",
        "_references",
        "_withheld",
        "capacity_blocks",
        "evictions",
        "shared_blocks",
    )

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.evictions = 0
        """Cached blocks whose contents were given up, since the start."""
        self.shared_blocks = 0
        """Blocks with more than one reference now."""
        self._references = [0] * capacity_blocks
        self._hash: list[bytes | None] = [None] * capacity_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(capacity_blocks - 1, -1, -1))
        self._withheld = 0
        self._cached = 0
        # Entry `capacity_blocks` is the sentinel: its newer neighbour is the oldest cached block.
        self._older = [capacity_blocks] * (capacity_blocks + 1)
        self._newer = [capacity_blocks] * (capacity_blocks + 1)

    # What there is

    @property
    def referenced_blocks(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.capacity_blocks - len(self._blank) - self._cached

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody holds and a prefix hit may still find."""
        return self._cached

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._blank)

    @property
    def limit_blocks(self) -> int:
        """Most blocks that may be referenced or cached."""
        return self.capacity_blocks - self._withheld

    @property
    def available_blocks(self) -> int:
        """Blocks that `get` or `touch` can reference now, cached ones included."""
        return max(0, len(self._blank) - self._withheld + self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._references[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or cached, or `None`."""
        return self._by_hash.get(block_hash)

    # Taking and giving back

    def get(self, count: int) -> list[int]:
        """`count` blocks with one reference each; blank ones first, then the oldest cached.

        Getting a and then b blocks gives the same blocks as getting a + b.
        """
        blank, references = self._blank, self._references
        left = len(blank) - count
        if left >= self._withheld and count >= 0:
            taken = blank[left:]
            del blank[left:]
            taken.reverse()
        else:
            taken = self._get_with_eviction(count)
        for block in taken:
            references[block] = 1
        return taken

    def _get_with_eviction(self, count: int) -> list[int]:
        blank = self._blank
        fresh = max(0, len(blank) - self._withheld)
        if not 0 <= count <= fresh + self._cached:
            raise OutOfBlocksError(
                f"asked for {count} blocks, but {self.available_blocks} are available "
                f"({self.referenced_blocks} of {self.limit_blocks} referenced)"
            )
        taken = self._evict_oldest(count - fresh)
        if fresh:
            taken = blank[: -fresh - 1 : -1] + taken
            del blank[-fresh:]
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to found blocks; a cached one leaves the list it could be evicted from."""
        references = self._references
        for block in blocks:
            count = references[block]
            if count == 0:
                if self._hash[block] is None:
                    raise RuntimeError(f"block {block} is blank: there is nothing to share")
                self._unlink(block)
            elif count == 1:
                self.shared_blocks += 1
            references[block] = count + 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each; give them in reverse order of the sequence."""
        references, hashes, blank = self._references, self._hash, self._blank
        older, newer, sentinel = self._older, self._newer, self.capacity_blocks
        newest = older[sentinel]
        cached = 0
        excess = None
        for block in blocks:
            count = references[block]
            if count == 1:
                references[block] = 0
                if hashes[block] is None:
                    blank.append(block)
                else:
                    newer[newest], older[block] = block, newest
                    newest = block
                    cached += 1
            elif count > 1:
                references[block] = count - 1
                if count == 2:
                    self.shared_blocks -= 1
            else:
                excess = block
                break
        newer[newest], older[sentinel] = sentinel, newest
        self._cached += cached
        if excess is not None:
            raise RuntimeError(f"block {excess} was freed more often than it was taken")
        if len(blank) < self._withheld:
            self._evict_down()

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held, full block findable. The first block with a content stays the one found."""
        if self._references[block] == 0 or self._hash[block] is not None:
            raise RuntimeError(f"block {block} can't be registered: nobody holds it, or it is")
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hash[block] = block_hash

    def limit(self, blocks: int) -> None:
        """Allow at most `blocks` to be in use, evicting cached ones above that at once.

        Referenced blocks stay; while they exceed the limit nothing is available.
        """
        if not 1 <= blocks <= self.capacity_blocks:
            raise ValueError(f"limit of {blocks} blocks is outside 1 … {self.capacity_blocks}")
        self._withheld = self.capacity_blocks - blocks
        self._evict_down()

    def forget(self) -> None:
        """Drop every cached content; held blocks stay held but are no longer found."""
        self._blank += self._evict_oldest(self._cached)
        for block in self._by_hash.values():
            self._hash[block] = None
        self._by_hash.clear()

    # The list of cached blocks

    def _evict_down(self) -> None:
        above = self._withheld - len(self._blank)
        if above > 0:
            self._blank += self._evict_oldest(min(above, self._cached))

    def _evict_oldest(self, count: int) -> list[int]:
        newer, hashes, by_hash = self._newer, self._hash, self._by_hash
        taken = []
        block = newer[self.capacity_blocks]
        for _ in range(count):
            block_hash = hashes[block]
            assert block_hash is not None
            del by_hash[block_hash]
            hashes[block] = None
            taken.append(block)
            block = newer[block]
        newer[self.capacity_blocks], self._older[block] = block, self.capacity_blocks
        self._cached -= count
        self.evictions += count
        return taken

    def _unlink(self, block: int) -> None:
        before, after = self._older[block], self._newer[block]
        self._newer[before], self._older[after] = after, before
        self._cached -= 1

    # Checking

    def free_order(self) -> list[int]:
        """All blocks that nobody holds, in the order in which they will be handed out."""
        order = self._blank[::-1]
        block = self._newer[self.capacity_blocks]
        while block != self.capacity_blocks and len(order) <= self.capacity_blocks:
            order.append(block)
            block = self._newer[block]
        return order

    def check(self) -> None:
        """Raise unless every block is in exactly one state and all books agree. O(capacity)."""
        order = self.free_order()
        cached = order[len(self._blank) :]
        held = [block for block, count in enumerate(self._references) if count > 0]
        found = {block: h for block, h in enumerate(self._hash) if h is not None}
        problems = [
            name
            for name, broken in (
                ("a count is negative", min(self._references) < 0),
                ("blocks are lost or doubled", sorted(order + held) != [*range(len(self._hash))]),
                ("cached blocks are miscounted", len(cached) != self._cached),
                ("a blank block has a hash", any(b in found for b in self._blank)),
                ("a cached block has none", any(b not in found for b in cached)),
                ("hashes and blocks disagree", {h: b for b, h in found.items()} != self._by_hash),
                ("shared is wrong", self.shared_blocks != sum(c > 1 for c in self._references)),
                ("too much is cached", self._cached > 0 and len(self._blank) < self._withheld),
                (
                    "links disagree",
                    any(self._newer[self._older[b]] != b for b in [*cached, self.capacity_blocks]),
                ),
            )
            if broken
        ]
        if problems:
            raise AssertionError(f"block pool is broken: {'; '.join(problems)}")
