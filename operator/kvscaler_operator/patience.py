"""Reads that the start can't do without, tried again while the API server is away.

One list that fails with 500 is no reason to end the process: the restart would ask for everything
again, from a server that has trouble. What no wait heals (a right that is missing) passes through.
The Lease bounds it all: who can't renew it ends, whatever it waits for here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvscaler_operator.gateways.kube import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 15.0


async def patiently(what: str, read: Callable[[], Awaitable[T]]) -> T:
    """The answer of `read`, which is repeated ever more slowly while it is `UnavailableError`."""
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            return await read()
        except UnavailableError as error:
            pause = max(wait, min(error.retry_after_seconds or 0.0, LONGEST_WAIT_SECONDS))
            logger.warning("%s failed, tried again in %.1f s: %s", what, pause, error)
        await asyncio.sleep(pause)
        wait = min(2.0 * wait, LONGEST_WAIT_SECONDS)
