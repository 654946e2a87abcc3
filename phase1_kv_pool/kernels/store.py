"""Store keys and values in pages: the interface and the reference.

kv      KVLayer                        one layer of the pool
slots   [tokens]                       page * page_size + offset; -1: padding, write nothing
k, v    [tokens, kv_heads, head_dim]   new keys and values, often views of one fused tensor
"""

from collections.abc import Callable

from torch import Tensor

from phase1_kv_pool.kernels.backends import Backends
from phase1_kv_pool.layer import KVLayer

Store = Callable[[KVLayer, Tensor, Tensor, Tensor], None]


# region reference
def reference(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store token by token. This defines the result."""
    page_size = kv.keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            kv.write((page, slice(None), offset), k[token], v[token])


# endregion


STORE: Backends[Store] = Backends(
    reference, "phase1_kv_pool.extras.cpu.store:store", "phase1_kv_pool.kernels.triton.store:store"
)
