"""Copy whole blocks inside the paged pool (copy on write).

A block that several sequences share is copied before one of them writes into it. All sources are
read before any target is written, so a block may be a source of one copy and a target of another.
"""

from collections.abc import Sequence

import torch


def copy_blocks(
    pool: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int]
) -> None:
    """For each layer of `pool` (`[blocks, …]`): block `targets[i]` becomes block `sources[i]`."""
    if not sources:
        return
    device = pool[0].device
    source = torch.tensor(sources, dtype=torch.int64, device=device)
    target = torch.tensor(targets, dtype=torch.int64, device=device)
    for layer in pool:
        layer.index_copy_(0, target, layer.index_select(0, source))
