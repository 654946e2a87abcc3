"""The store by itself, in the three ways that tests and measurements compare."""

from collections.abc import Callable

from torch import Tensor

from phase1_kv_pool.kernels import interpret
from phase1_kv_pool.kernels.store import store
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


def store_of(way: str) -> Store:
    """reference, cpu (in torch, all tokens together) or triton."""
    if way != "triton":
        return {"reference": reference, "cpu": store}[way]
    interpret.prepare_triton()
    from phase1_kv_pool.lab.store_kernel import store_on_gpu

    return store_on_gpu
