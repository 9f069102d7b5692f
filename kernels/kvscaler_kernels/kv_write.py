"""Write new keys and values into their slots of the paged pool.

`pool[slot] = kv[token]` with `slot = block * block_tokens + offset`. A slot holds a token's keys
and values of all KV heads side by side, `[2, kv_heads, head_dim]`, so one copy writes both.
"""

import torch


def write_kv(layer_pool: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Store the rows `kv` (`[tokens, 2 * kv_heads * head_dim]`) at `slots` (`[tokens]`, int64).

    `layer_pool` is one layer's `[blocks, block_tokens, 2, kv_heads, head_dim]`, contiguous.
    """
    layer_pool.view(-1, kv.shape[1]).index_copy_(0, slots, kv)
