"""Token bucket and circuit breaker on virtual time."""

import asyncio

from kvscaler_operator.gateways.breaker import Breaker, BreakerState
from kvscaler_operator.gateways.limiter import TokenBucket

from tests.controller.virtual_time import run


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        bucket, begun = TokenBucket(10, 5), loop.time()
        times = []
        for _ in range(25):
            await bucket.take()
            times.append(loop.time() - begun)
        assert times[4] == 0
        assert abs(times[-1] - 2.0) < 1e-6

    run(scenario())


def test_a_bucket_serves_waiters_in_order() -> None:
    async def scenario() -> None:
        bucket = TokenBucket(1, 1)
        order: list[int] = []

        async def take(number: int) -> None:
            await bucket.take()
            order.append(number)

        await asyncio.gather(*(take(number) for number in range(6)))
        assert order == list(range(6))

    run(scenario())


def test_a_bucket_refuses_when_asked_not_to_wait() -> None:
    async def scenario() -> None:
        bucket = TokenBucket(1, 2)
        assert [bucket.try_take() for _ in range(3)] == [True, True, False]
        await asyncio.sleep(1)
        assert bucket.try_take()

    run(scenario())


def test_the_breaker_opens_probes_once_and_closes() -> None:
    async def scenario() -> None:
        breaker = Breaker(threshold=3, pause_seconds=5, pause_cap_seconds=20)
        for _ in range(2):
            assert breaker.allows()
            breaker.failed()
        assert breaker.state is BreakerState.CLOSED
        breaker.failed()
        assert not breaker.allows()
        await asyncio.sleep(5)
        assert breaker.allows()
        assert not breaker.allows()  # one probe at a time
        breaker.failed()
        await asyncio.sleep(5)
        assert not breaker.allows()  # the pause has doubled
        await asyncio.sleep(5)
        assert breaker.allows()
        breaker.succeeded()
        assert breaker.state is BreakerState.CLOSED
        breaker.failed()
        assert breaker.allows()

    run(scenario())
