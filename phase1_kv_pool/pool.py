"""KVPool: the keys and values themselves, a tensor of pages for each layer.

    keys[layer], values[layer]   [pages, kv_heads, page_size, head_dim]

Attention reads one head of one sequence at a time. In this order the part of a page that belongs to a head is one piece
of page_size * head_dim numbers; with the token before the head it would be page_size pieces. A token's own heads lie
apart instead, which costs little: they are written once and read at every step. K and V are apart for the same reason:
attention is done with all keys of a tile before it wants the first value.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phase1_kv_pool.kernels.store import STORE
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.memory import free_bytes

GIB = 1 << 30


class KVPool:
    """All pages of a cache on one device, zeroed: 0 times a number that was never written must not be NaN.

    Slots are numbers on the device. On a GPU nobody looks at them before they are used, because to look is to wait for
    all that the GPU still has to do; a slot past the end overwrites what lies there. `validate=True` looks, and refuses
    them with ValueError: for tests, and for the day when answers are strange. On a CPU torch itself refuses such slots.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        *,
        validate: bool = False,
    ) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise ValueError(f"num_pages must be an integer from 1, got {num_pages!r}")
        if dtype is not None:
            layout = replace(layout, dtype=str(dtype).removeprefix("torch."))
        self.layout = layout  # of these pages as they are, so its figures in bytes hold for them
        self.num_pages = num_pages
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.device = _device(device)
        self.validate = validate
        _refuse_too_much(layout, num_pages, self.device)
        shape = num_pages, layout.kv_heads, layout.page_size, layout.head_dim
        self.keys = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layout.layers)]
        self.values = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layout.layers)]
        self._store = STORE.on(self.device)

    @property
    def num_slots(self) -> int:
        """Room for so many tokens; slots run from 0 to one less."""
        return self.num_pages * self.layout.page_size

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.layout.bytes_per_page

    # region store
    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write a key and a value for each slot; where the slot is -1, nothing.

        slots: [tokens]; k, v: [tokens, kv_heads, head_dim], which may be views of a larger tensor. No slot twice.
        """
        self._refuse_misfits(layer, slots, k, v)
        if self.validate:
            self._refuse_foreign(slots)
        self._store(self.keys[layer], self.values[layer], slots, k, v)

    # endregion

    # region gather
    def gather(self, layer: int, table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `length` keys and values of a page table, [length, kv_heads, head_dim]: for checks."""
        self._refuse_layer(layer)
        pages = list(table[: self.layout.pages_for(length)])
        if length < 0 or len(pages) * self.layout.page_size < length:
            room = len(pages) * self.layout.page_size
            raise ValueError(f"length must be from 0 to the {room} tokens that the table has room for, got {length}")
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not of this pool; its pages run from 0 to {self.num_pages - 1}")
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        k, v = (side[layer][index].transpose(1, 2).flatten(0, 1)[:length] for side in (self.keys, self.values))
        return k, v

    # endregion

    def _refuse_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layout.layers:
            raise ValueError(f"layer must be from 0 to {self.layout.layers - 1}, got {layer}")

    def _refuse_misfits(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Everything about the arguments that can be told without reading them off the device."""
        self._refuse_layer(layer)
        if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32) or slots.device != self.device:
            raise ValueError(f"slots must be [tokens] in int64 or int32 on {self.device}, got {_what(slots)}")
        shape = (len(slots), self.layout.kv_heads, self.layout.head_dim)
        for name, rows in (("k", k), ("v", v)):
            if rows.shape != shape or rows.dtype != self.dtype or rows.device != self.device:
                wanted = f"{list(shape)} in {self.layout.dtype} on {self.device}"
                raise ValueError(f"{name} must be {wanted} for {len(slots)} slots, got {_what(rows)}")

    def _refuse_foreign(self, slots: Tensor) -> None:
        foreign = slots[(slots < -1) | (slots >= self.num_slots)].tolist()
        if foreign:
            raise ValueError(
                f"slot {foreign[0]} is not of this pool; slots run from 0 to {self.num_slots - 1}, and -1 is padding"
            )


def _device(device: str | torch.device) -> torch.device:
    """The device as tensors on it will name it: "cuda" is one of several."""
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {str(device)!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was asked for, and torch {torch.__version__} sees no GPU here")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _refuse_too_much(layout: KVLayout, num_pages: int, device: torch.device) -> None:
    """Say before anything is allocated that it would not fit, and what would."""
    free = free_bytes(device)
    wanted = num_pages * layout.bytes_per_page
    if free is not None and wanted > free:
        raise ValueError(
            f"{num_pages} pages of {layout.page_size} tokens need {wanted / GIB:.2f} GiB on {device}, where "
            f"{free / GIB:.2f} GiB are free; {layout.pages_in(free)} pages would fit"
        )


def _what(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
