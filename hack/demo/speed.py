"""How fast this machine is: what one replica serves with its pool full, measured for ten seconds.

The demo's rates follow from it, so that the spike needs the same share of memory on any machine.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any

from hack.demo.kube import Kube
from hack.demo.traffic import Shape, saturate

MEASURE_SECONDS = 10.0
FILL_SECONDS = 40.0
FULL_SHARE = 0.85


async def measure_speed(kube: Kube, pod_ip: str, model: str) -> dict[str, float]:
    """Rates of one replica under a closed loop that keeps its queue filled.

    Raises `TimeoutError` when its pool does not fill, naming what it held.
    """
    shape = Shape()

    async def state() -> dict[str, Any]:
        found: dict[str, Any] = await kube.pod_json(pod_ip, 9090, "/state")
        return found

    capacity = (await state())["limits"]["applied"]["kv_blocks"]
    load = asyncio.create_task(
        saturate(
            f"http://{pod_ip}:8000",
            model,
            shape,
            concurrency=max(8, capacity // 3),
            seconds=FILL_SECONDS + MEASURE_SECONDS,
        )
    )
    try:
        await _until_full(state, capacity)
        states = [await state()]
        began = time.monotonic()
        while time.monotonic() < began + MEASURE_SECONDS:
            await asyncio.sleep(0.5)
            states.append(await state())
        took = time.monotonic() - began
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
    tokens_per_second = (_generated_tokens(states[-1]) - _generated_tokens(states[0])) / took
    requests_per_second = tokens_per_second / shape.mean_output_tokens
    used = sum(s["occupancy"]["referenced_blocks"] for s in states) / len(states)
    # Little's law: blocks in use = requests a second x block-seconds of a request.
    return {
        "output_tokens_per_second": tokens_per_second,
        "requests_per_second": requests_per_second,
        "mean_referenced_blocks": used,
        "block_seconds_per_request": used / requests_per_second,
        "requests_per_second_that_fill_one_replica": requests_per_second * capacity / used,
    }


async def _until_full(state: Any, capacity: int) -> None:
    deadline = time.monotonic() + FILL_SECONDS
    while True:
        occupancy = (await state())["occupancy"]
        full = occupancy["reserved_blocks"] >= FULL_SHARE * capacity
        if full and occupancy["waiting_requests"] > 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the measured replica's pool did not fill within {FILL_SECONDS:.0f} s: "
                f"{occupancy['reserved_blocks']} of {capacity} blocks reserved"
            )
        await asyncio.sleep(0.25)


def _generated_tokens(state: dict[str, Any]) -> float:
    """Output tokens that a replica has generated, of finished and of running requests."""
    finished: float = state["traffic"]["finished_output_tokens"]
    return finished + float(state["in_flight"]["generated_tokens"])
