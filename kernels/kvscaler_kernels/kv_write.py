"""Write new keys and values into their slots of the paged pool.

`pool[slot] = kv[token]` with `slot = block * block_tokens + offset`. A slot holds a token's keys
and values of all KV heads side by side, `[2, kv_heads, head_dim]`, so one copy writes both.
"""

import torch


def write_kv(layer_slots: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Store the rows `kv` (`[tokens, width]`) at `slots` (`[tokens]`, int64).

    `layer_slots` is one layer's pool as `[blocks * block_tokens, width]`.
    """
    layer_slots.index_copy_(0, slots, kv)
