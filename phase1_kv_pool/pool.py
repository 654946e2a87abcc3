"""KVPool: the key and value tensors, one of each for every layer, cut into pages.

    layers[layer].keys, .values               [pages, kv_heads, page_size, head_dim]
    layers[layer].key_scales, .value_scales   [pages, kv_heads, page_size], of keys and values in 8 bits

Attention reads one head of one sequence at a time. With heads before tokens, a head's part of a page is contiguous
(page_size * head_dim numbers); with tokens first it would be page_size separate pieces. The heads of one token are not
contiguous, which costs little: a token is written once and read at every step. K and V are separate tensors because
attention processes all keys of a tile before the first value.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phase0_request.checks import check_int
from phase1_kv_pool.kernels.store import STORE
from phase1_kv_pool.layer import HIGHEST, KVLayer, torch_dtype
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.memory import free_bytes, zeros

GIB = 1 << 30


class KVPool:
    """All pages of a KV cache on one device, initialized to 0: a masked value is multiplied by 0, and 0 * NaN is NaN.

    Slots are tensors on the device. On a GPU they are not checked, because reading them would synchronize with the GPU;
    an out-of-range slot overwrites other memory. On a CPU torch checks the range.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("num_pages", num_pages, 1)
        if dtype is not None:
            layout = replace(layout, dtype=str(dtype).removeprefix("torch."))
        self.layout = layout  # with the dtype of the pool, so that its byte counts are those of the tensors
        self.num_pages = num_pages
        self.dtype: torch.dtype = torch_dtype(layout.dtype)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {str(device)!r} needs a GPU, and torch {torch.__version__} sees none")
        self.device = torch.empty(0, device=device).device  # with its index: "cuda" becomes "cuda:0"
        if layout.dtype == "fp8" and self.device.type == "cuda":
            _check_float8(torch.cuda.get_device_capability(self.device))
        _check_memory(layout, num_pages, self.device)
        self.layers = [self._layer() for _ in range(layout.layers)]
        self._store = STORE.on(self.device)

    def _layer(self) -> KVLayer:
        shape = self.num_pages, self.layout.kv_heads, self.layout.page_size
        keys, values = (zeros((*shape, self.layout.head_dim), self.dtype, self.device) for _ in range(2))
        if self.dtype not in HIGHEST:
            return KVLayer(keys, values)
        return KVLayer(keys, values, *(zeros(shape, torch.float32, self.device) for _ in range(2)))

    @property
    def tensors(self) -> list[Tensor]:
        """All that the pool has in memory."""
        return [tensor for layer in self.layers for tensor in layer if tensor is not None]

    @property
    def num_slots(self) -> int:
        """The number of token slots, numbered from 0."""
        return self.num_pages * self.layout.page_size

    # region store
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the key and value of each token to its slot; -1 is padding and writes nothing.

        slots: [tokens], without duplicates; k, v: [tokens, kv_heads, head_dim], may be views of a larger tensor.
        """
        self._check_shapes(slots, k, v)
        self._store(self.layers[layer], slots, k, v)

    # endregion

    def gather(self, layer: int, table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Copy the first `length` keys and values of a page table, [length, kv_heads, head_dim]. For tests."""
        pages = table[: self.layout.pages_for(length)]
        # region exercise 1.4
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        k, v = (side.transpose(1, 2).flatten(0, 1)[:length] for side in self.layers[layer].read(index))
        return k, v
        # endregion

    def _check_shapes(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Check shapes, dtypes and devices, without synchronization with the device."""
        if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32) or slots.device != self.device:
            raise ValueError(f"slots must be [tokens] in int64 or int32 on {self.device}, got {_describe(slots)}")
        shape = (len(slots), self.layout.kv_heads, self.layout.head_dim)
        for name, rows in (("k", k), ("v", v)):
            dtype_fits = rows.is_floating_point() if self.dtype in HIGHEST else rows.dtype == self.dtype
            if rows.shape != shape or not dtype_fits or rows.device != self.device:
                wanted = f"{list(shape)} in {self.layout.dtype} on {self.device}"
                raise ValueError(f"{name} must be {wanted} for {len(slots)} slots, got {_describe(rows)}")


def _check_float8(capability: tuple[int, int]) -> None:
    if capability < (8, 9):
        version = ".".join(map(str, capability))
        raise ValueError(f"fp8 keys and values need a GPU of compute capability 8.9, this is {version}; int8 works")


def _check_memory(layout: KVLayout, num_pages: int, device: torch.device) -> None:
    """Raise ValueError, before anything is allocated, if the pool would not fit; the message says what would."""
    free = free_bytes(device)
    wanted = num_pages * layout.bytes_per_page
    if free is not None and wanted > free:
        raise ValueError(
            f"{num_pages} pages of {layout.page_size} tokens need {wanted / GIB:.2f} GiB on {device}, where "
            f"{free / GIB:.2f} GiB are free; {layout.pages_in(free)} pages would fit"
        )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
