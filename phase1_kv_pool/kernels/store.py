"""Store keys and values in pages, three ways.

keys, values   [pages, kv_heads, page_size, head_dim]   one layer of the pool
slots          [tokens]                                 page * page_size + offset; -1: padding, write nothing
k, v           [tokens, kv_heads, head_dim]             what the layer computed, often views of one fused tensor
"""

from collections.abc import Callable

from torch import Tensor

from phase1_kv_pool.kernels.ways import Ways

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


# region reference
def reference(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Token by token: what storing means."""
    page_size = keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            keys[page, :, offset] = k[token]
            values[page, :, offset] = v[token]


# endregion


# region cpu
def cpu(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """All tokens in one indexed assignment to each tensor. It reads k and v as they lie and copies nothing first."""
    if len(slots) == 0:
        return
    if slots.min().item() < 0:  # padding is looked for once a call, not once a token
        stored = slots >= 0
        slots, k, v = slots[stored], k[stored], v[stored]
    page_size = keys.shape[2]
    where = slots // page_size, slots % page_size
    keys.transpose(1, 2).index_put_(where, k)
    values.transpose(1, 2).index_put_(where, v)


# endregion


STORE: Ways[Store] = Ways(reference, cpu, "phase1_kv_pool.kernels.store_triton:store")
