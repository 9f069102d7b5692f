"""How fast the block pool takes and gives back blocks, against vLLM's own and a bare deque.

    bench/block_pool.py [--peer-python PATH_TO_PYTHON_WITH_VLLM] [--check]

Blocks a second for get + free at 1, 8 and 64 blocks a call, on a pool of 100,000: `blank`, and
`hashed`, where each block taken evicts a cached content and is registered under a new one.
A deque's popleft + append for each block is the yardstick of this core. vLLM's pool reached 0.12,
0.37 and 0.55 of its rate at 1, 8 and 64 blocks a call when both were measured on one core, and
this is the floor where no vLLM is at hand. Time is this process's own on the CPU, so that other
processes take none of it.
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
VLLM_TO_DEQUE = {1: 0.12, 8: 0.37, 64: 0.55}
"""vLLM 0.33.0's get + free as a share of a deque's popleft + append, Python 3.11, one core."""

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
                    floor=f">= {VLLM_TO_DEQUE[batch]}" if kind == "blank" else None,
                    aim=f">= {VLLM_TO_DEQUE[batch] * 1.3:.2f}" if kind == "blank" else None,
                    peer={"deque": found["deque"].median},
                )
            )
    if peer is not None:
        peer.close()
    return report("block_pool", figures, detail, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
