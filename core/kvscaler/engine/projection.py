"""The most blocks that admitted requests will hold at once, if each ends when it is expected to.

Between two ends use only grows, so it peaks just before an end. With requests ordered by their
end, the peak is the maximum over ends `t` of the blocks that those still alive then hold after `t`
steps. In tokens this is the formula of the Past-Future scheduler (Gong et al., ASPLOS '25; code in
lightllm's `_can_add_new_req`): max over i of (held by the i longest) + i x (remaining of the i-th).
Here it is in blocks by the footprint, whatever its shape as long as it never falls, and a request
may end later than it stops growing (`end_steps`), which covers waiting for its prefill.

n requests have up to n ends, and n x n footprints would be slow. A range of ends is bounded from
above by those alive at its first end, grown to its last; the range with the highest bound is
halved until it is a single end, whose bound is exact and no other's can exceed it.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from kvscaler.engine.limits import BlocksOf


class Holding(NamedTuple):
    """What one request holds and will hold. A step gives each request at most one token."""

    prompt_tokens: int
    generated_tokens: int
    remaining_tokens: int
    """Output tokens still expected."""
    end_steps: int
    """Latest step at which it ends, at least `remaining_tokens`."""
    shared_blocks: int = 0
    """Blocks counted with another request that holds them too and ends no earlier."""

    def after(self, steps: int) -> "Holding":
        """The same request, `steps` steps of growth later."""
        grown = min(steps, self.remaining_tokens)
        return self._replace(
            generated_tokens=self.generated_tokens + grown,
            remaining_tokens=self.remaining_tokens - grown,
            end_steps=max(0, self.end_steps - steps),
        )


def projected_peak_blocks(
    holdings: Iterable[Holding], footprint: BlocksOf, enough_blocks: int = 0
) -> int:
    """The peak in blocks; 0 for no request.

    With `enough_blocks` the search stops as soon as the peak is known not to exceed it; a result
    up to that is an upper bound of the peak, one above it is the exact peak.
    """
    ordered = sorted(holdings, key=_end, reverse=True)
    if not ordered:
        return 0
    ends, alive = _ends(ordered)

    def bound(first: int, last: int) -> int:
        steps, total = ends[last], 0
        for prompt, generated, remaining, _, shared in ordered[: alive[first]]:
            grown = generated + (steps if steps < remaining else remaining)
            total += footprint(prompt, grown) - shared
        return total

    last = len(ends) - 1
    ranges = [(-bound(0, last), 0, last)]
    while True:
        negative, first, last = heappop(ranges)
        if first == last or -negative <= enough_blocks:
            return -negative
        middle = (first + last) // 2
        heappush(ranges, (-bound(first, middle), first, middle))
        heappush(ranges, (-bound(middle + 1, last), middle + 1, last))


def _end(holding: Holding) -> int:
    return holding.end_steps


def _ends(ordered: Sequence[Holding]) -> tuple[list[int], list[int]]:
    """Distinct ends, ascending, and how many (a leading part of `ordered`) are alive until each."""
    ends: list[int] = []
    alive: list[int] = []
    for index in range(len(ordered) - 1, -1, -1):
        if not ends or ordered[index].end_steps != ends[-1]:
            ends.append(ordered[index].end_steps)
            alive.append(index + 1)
    return ends, alive


def steps_until_fit(
    holdings: Sequence[Holding],
    candidate: Holding,
    footprint: BlocksOf,
    limit_blocks: int,
    max_sequences: int,
) -> int:
    """Steps until `candidate` fits beside those of `holdings` that are still alive then.

    0 if it fits now. Counts only ends that are expected, so it is as good as the lengths are.
    """
    ends = [0, *sorted({max(1, holding.end_steps) for holding in holdings})]

    def fits(index: int) -> bool:
        steps = ends[index]
        # Sharing with what has ended by then is gone, so it is left out: an upper bound.
        later = [
            holding.after(steps)._replace(shared_blocks=0) if steps else holding
            for holding in holdings
            if holding.end_steps > steps or steps == 0
        ]
        if len(later) >= max_sequences:
            return False
        peak = projected_peak_blocks([*later, candidate], footprint, limit_blocks)
        return peak <= limit_blocks

    low, high = 0, len(ends) - 1  # after the last end it is alone, and fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return ends[low]
