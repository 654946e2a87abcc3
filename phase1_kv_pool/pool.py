"""KVPool: the key and value tensors, one of each for every layer, cut into pages.

    layers[layer].keys, .values               [pages, kv_heads, page_size, head_dim]
    layers[layer].key_scales, .value_scales   [pages, kv_heads, page_size], of keys and values in 8 bits

Attention reads one head of one sequence at a time. With heads before tokens, a head's part of a page is contiguous
(page_size * head_dim numbers); with tokens first it would be page_size separate pieces. The heads of one token are not
contiguous, which costs little, because a token is written once and read at every step. K and V are separate tensors
because attention processes all keys of a tile before the first value.
"""

from dataclasses import replace

import torch
from torch import Tensor

from phase0_request.support.checks import check_int
from phase0_request.support.memory import free_bytes
from phase1_kv_pool.layer import HIGHEST, KVLayer, torch_dtype
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.memory import zeros

GIB = 1 << 30


class KVPool:
    """All pages of a KV cache on one device, initialized to 0: attention multiplies masked values by 0; 0 * NaN is NaN.

    Slots are tensors on the device. On a GPU nothing checks them, because reading them would synchronize with the GPU,
    and an out-of-range slot overwrites other memory. On a CPU torch checks the range.
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

    def _layer(self) -> KVLayer:
        shape = self.num_pages, self.layout.kv_heads, self.layout.page_size
        keys, values = (zeros((*shape, self.layout.head_dim), self.dtype, self.device) for _ in range(2))
        if self.dtype not in HIGHEST:
            return KVLayer(keys, values)
        return KVLayer(keys, values, *(zeros(shape, torch.float32, self.device) for _ in range(2)))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the pool."""
        return [tensor for layer in self.layers for tensor in layer if tensor is not None]


def _check_float8(capability: tuple[int, int]) -> None:
    if capability < (8, 9):
        version = ".".join(map(str, capability))
        raise ValueError(f"fp8 keys and values need a GPU of compute capability 8.9, this is {version}; int8 works")


def _check_memory(layout: KVLayout, num_pages: int, device: torch.device) -> None:
    """ValueError, before anything is allocated, if the pool would not fit. The message says how much would."""
    free = free_bytes(device)
    wanted = num_pages * layout.bytes_per_page
    if free is not None and wanted > free:
        raise ValueError(
            f"{num_pages} pages of {layout.page_size} tokens need {wanted / GIB:.2f} GiB on {device}, where "
            f"{free / GIB:.2f} GiB are free; {layout.pages_in(free)} pages would fit"
        )
