"""The work queue has the semantics of client-go's, on virtual time."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st
from kvscaler_operator.queue import WorkQueue

from tests.controller.virtual_time import run


async def drained(queue: WorkQueue[str]) -> list[str]:
    """All keys that wait now."""
    keys = []
    while len(queue):
        key = await queue.get()
        keys.append(key)
        queue.done(key)
    return keys


def test_many_marks_cost_one_reconcile() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(10):
            queue.add("a")
        queue.add("b")
        assert await drained(queue) == ["a", "b"]

    run(scenario())


def test_a_key_marked_while_held_comes_back_only_after_done() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        queue.add("a")
        assert len(queue) == 0
        queue.done(key)
        assert await drained(queue) == ["a"]

    run(scenario())


def test_of_several_delays_the_earliest_holds() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        queue.add_after("a", 30)
        queue.add_after("a", 5)
        queue.add_after("a", 60)
        queue.done(await queue.get())
        assert loop.time() - begun == 5
        await asyncio.sleep(120)
        assert len(queue) == 0

    run(scenario())


def test_a_delay_of_zero_or_less_is_not_lost() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 0)
        queue.add_after("b", -3)
        assert await drained(queue) == ["a", "b"]

    run(scenario())


def test_backoff_doubles_to_its_cap_and_is_forgotten_on_success() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(
            backoff_base_seconds=1, backoff_cap_seconds=10, randomness=random.Random(1)
        )
        delays = [queue.add_failed("a") for _ in range(6)]
        bare = [1, 2, 4, 8, 10, 10]
        assert all(b <= d <= 1.2 * b for b, d in zip(bare, delays, strict=True))
        assert queue.failures("a") == 6
        queue.forget("a")
        assert queue.add_failed("a") <= 1.2

    run(scenario())


def test_the_oldest_key_tells_how_long_it_waits() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        assert queue.oldest_age_seconds() == 0
        queue.add("a")
        await asyncio.sleep(7)
        queue.add("b")
        assert queue.oldest_age_seconds() == 7
        queue.done(await queue.get())
        assert queue.oldest_age_seconds() == 0

    run(scenario())


def test_a_closed_queue_takes_nothing_and_fires_nothing() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 1)
        queue.close()
        queue.add("b")
        await asyncio.sleep(5)
        assert len(queue) == 0

    run(scenario())


Action = st.tuples(
    st.sampled_from(["add", "after", "fail", "work"]), st.sampled_from("abc"), st.floats(0, 5)
)


@given(st.lists(Action, max_size=60))
def test_no_mark_is_lost_and_no_key_is_held_twice(actions: list[tuple[str, str, float]]) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(backoff_base_seconds=0.1, backoff_cap_seconds=1)
        held: set[str] = set()
        marked: dict[str, float] = {}
        worked: dict[str, float] = {}
        loop = asyncio.get_running_loop()

        async def worker() -> None:
            while True:
                key = await queue.get()
                assert key not in held
                held.add(key)
                worked[key] = loop.time()
                await asyncio.sleep(0.5)
                held.discard(key)
                queue.done(key)

        workers = [asyncio.create_task(worker()) for _ in range(3)]
        for kind, key, seconds in actions:
            marked[key] = loop.time()
            if kind == "add":
                queue.add(key)
            elif kind == "after":
                queue.add_after(key, seconds)
            elif kind == "fail":
                queue.add_failed(key)
            else:
                del marked[key]
                await asyncio.sleep(seconds)
        await asyncio.sleep(20)
        for each in workers:
            assert not each.done()
            each.cancel()
        assert all(worked.get(key, -1.0) >= at for key, at in marked.items())

    run(scenario())


def test_a_failed_key_waits_for_as_long_as_a_server_asked() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        assert 30 <= queue.add_failed("a", at_least_seconds=30.0) <= 36
        assert queue.failures("a") == 1
        begun = asyncio.get_running_loop().time()
        queue.done(await queue.get())
        assert asyncio.get_running_loop().time() - begun >= 30

    run(scenario())
