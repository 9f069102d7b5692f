"""The pool against a naive model: three plain lists and a dictionary."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvscaler.engine.block_pool import BlockPool, OutOfBlocksError


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_blank_blocks_are_reused_last_out_first_in_and_hashed_ones_oldest_first():
    pool = BlockPool(6)
    first, second, third = pool.get(2), pool.get(2), pool.get(1)
    assert (first, second, third) == ([0, 1], [2, 3], [4])
    pool.register(0, digest(0))
    pool.register(1, digest(1))
    pool.free(reversed(first))
    pool.free(reversed(second))
    assert pool.free_order() == [2, 3, 5, 1, 0], "tail of the prefix goes before its head"
    assert (pool.referenced_blocks, pool.cached_blocks, pool.free_blocks) == (1, 2, 3)
    assert pool.get(4) == [2, 3, 5, 1]
    assert pool.find(digest(1)) is None
    assert pool.find(digest(0)) == 0
    assert pool.evictions == 1
    pool.check()


def test_a_touched_block_leaves_the_middle_of_the_list():
    pool = BlockPool(4)
    blocks = pool.get(4)
    for block in blocks:
        pool.register(block, digest(block))
    pool.free(blocks)
    pool.touch([2, 1])
    assert pool.free_order() == [0, 3]
    pool.touch([2])
    assert pool.references(2) == 2
    assert pool.shared_blocks == 1
    pool.free([2])
    assert pool.shared_blocks == 0
    pool.check()


def test_the_first_block_with_a_content_is_the_one_that_is_found():
    pool = BlockPool(3)
    first, second = pool.get(2)
    pool.register(first, digest(7))
    pool.register(second, digest(7))
    pool.free([second])
    assert pool.cached_blocks == 0
    assert pool.find(digest(7)) == first
    pool.check()


def test_misuse_is_loud():
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="asked for 3 blocks, but 2 are available"):
        pool.get(3)
    with pytest.raises(OutOfBlocksError):
        pool.get(-1)
    (block,) = pool.get(1)
    pool.free([block])
    with pytest.raises(RuntimeError, match="freed more often"):
        pool.free([block])
    with pytest.raises(RuntimeError, match="blank"):
        pool.touch([block])
    with pytest.raises(RuntimeError, match="registered"):
        pool.register(block, digest(1))
    with pytest.raises(ValueError, match="outside"):
        pool.limit(3)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
    pool.check()


def test_a_lower_limit_evicts_cache_at_once_and_waits_for_referenced_blocks():
    pool = BlockPool(8)
    held, cached = pool.get(5), pool.get(3)
    for block in cached:
        pool.register(block, digest(block))
    pool.free(reversed(cached))
    pool.limit(6)
    assert (pool.referenced_blocks, pool.cached_blocks, pool.available_blocks) == (5, 1, 1)
    pool.limit(3)
    assert (pool.referenced_blocks, pool.cached_blocks, pool.available_blocks) == (5, 0, 0)
    pool.register(held[4], digest(99))
    pool.free([held[4]])
    assert pool.cached_blocks == 0, "what is freed above the limit is not kept as cache"
    pool.free(held[1:4])
    assert pool.available_blocks == 2
    with pytest.raises(OutOfBlocksError):
        pool.get(3)
    pool.limit(8)
    assert pool.available_blocks == 7
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random use with a tiny world, so that every edge is met often."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 7
        self.pool = BlockPool(self.capacity)
        self.limit = self.capacity
        self.blank = list(range(self.capacity))
        self.cached: list[int] = []
        self.contents: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def available(self) -> int:
        return max(0, self.limit - len(self.held))

    @rule(count=st.integers(0, 4))
    def get(self, count: int) -> None:
        if count > self.available():
            with pytest.raises(OutOfBlocksError):
                self.pool.get(count)
            return
        fresh = min(count, max(0, len(self.blank) - (self.capacity - self.limit)))
        expected = self.blank[:fresh] + self.cached[: count - fresh]
        for block in self.cached[: count - fresh]:
            del self.contents[block]
        self.blank, self.cached = self.blank[fresh:], self.cached[count - fresh :]
        assert self.pool.get(count) == expected
        self.held |= dict.fromkeys(expected, 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(blocks)
        for block in blocks:
            self.held[block] -= 1
            if self.held[block] == 0:
                del self.held[block]
                if block in self.contents:
                    self.cached.append(block)
                else:
                    self.blank.insert(0, block)
        self.evict_down()

    def evict_down(self) -> None:
        while self.cached and len(self.held) + len(self.cached) > self.limit:
            block = self.cached.pop(0)
            del self.contents[block]
            self.blank.insert(0, block)

    @precondition(lambda self: any(b not in self.contents for b in self.held))
    @rule(data=st.data(), content=st.integers(0, 3))
    def register(self, data: st.DataObject, content: int) -> None:
        block = data.draw(st.sampled_from(sorted(b for b in self.held if b not in self.contents)))
        self.pool.register(block, digest(content))
        if content not in self.contents.values():
            self.contents[block] = content

    @rule(content=st.integers(0, 3))
    def touch(self, content: int) -> None:
        block = self.pool.find(digest(content))
        assert block == next((b for b, c in self.contents.items() if c == content), None)
        if block is None:
            return
        self.pool.touch([block])
        if block in self.cached:
            self.cached.remove(block)
        self.held[block] = self.held.get(block, 0) + 1

    @rule(limit=st.integers(1, 7))
    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.pool.limit(limit)
        self.evict_down()

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        for block in self.cached:
            self.blank.insert(0, block)
        self.cached, self.contents = [], {}

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        assert pool.free_order() == self.blank + self.cached
        assert pool.referenced_blocks == len(self.held)
        assert pool.cached_blocks == len(self.cached)
        assert pool.referenced_blocks + pool.cached_blocks + pool.free_blocks == self.capacity
        assert pool.available_blocks == self.available()
        assert {b: pool.references(b) for b in self.held} == self.held


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40)
