"""Store keys and values in pages, in plain torch.

kv      KVLayer                        one layer of the pool
slots   [tokens]                       page * page_size + offset; -1: padding, write nothing
k, v    [tokens, kv_heads, head_dim]   new keys and values, often views of one fused tensor
"""

from torch import Tensor

from phase1_kv_pool.layer import KVLayer


def store(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store all tokens in one indexed assignment per tensor. k and v may be strided views; they are not copied."""
    # region exercise 1.5
    if len(slots) == 0:
        return
    if slots.min().item() < 0:  # check for padding once per call, not once per token
        stored = slots >= 0
        slots, k, v = slots[stored], k[stored], v[stored]
    page_size = kv.keys.shape[2]
    kv.write((slots // page_size, slice(None), slots % page_size), k, v)
    # endregion
