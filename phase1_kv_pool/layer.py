"""KVLayer: the keys and values of one layer of a model, in pages. 8-bit ones have scales.

An 8-bit page takes about half the bytes of a bfloat16 page, so a pool of the same size holds nearly twice the tokens,
and attention reads half as much. For each token and KV head, the key has a scale and the value has one, taken from the
largest number. So a token's stored numbers depend on no other token, no later token changes them, and nothing needs
sample data for calibration. A head with a few large numbers costs the others no precision.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

HIGHEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest number of each 8-bit format
LOWEST_PEAK = 2.0**-100  # a head with no larger number is scaled as if it had this one: the scale of zeros is not 0


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a name in KVLayout stands for."""
    return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)


class KVLayer(NamedTuple):
    """One layer of a pool. Scales are None unless keys and values have 8 bits."""

    keys: Tensor  # [pages, kv_heads, page_size, head_dim]
    values: Tensor
    key_scales: Tensor | None = None  # [pages, kv_heads, page_size] float32
    value_scales: Tensor | None = None

    def read(self, where: Any) -> tuple[Tensor, Tensor]:
        """The keys and values at an index of the first dimensions; 8-bit ones become float32."""
        k, v = (
            numbers[where] if scales is None else numbers[where].float() * scales[where][..., None]
            for numbers, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        )
        return k, v

    def gather(self, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copy the first `length` keys and values of a page table, [length, kv_heads, head_dim]."""
        # region exercise 1.4
        k, v = (side.transpose(1, 2).flatten(0, 1)[:length] for side in self.read(pages))
        return k, v
        # endregion

    def write(self, where: Any, k: Tensor, v: Tensor) -> None:
        """Store keys and values, [..., head_dim], at an index of the first dimensions."""
        for numbers, scales, x in ((self.keys, self.key_scales, k), (self.values, self.value_scales, v)):
            if scales is None:
                numbers[where] = x
            else:
                numbers[where], scales[where] = quantize(x, numbers.dtype)


# region exercise 1.7
def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads [..., head_dim] as 8-bit numbers and their scales [...] in float32: x is numbers * scales.

    A head with a NaN or an infinity gets zeros and a scale that is not finite, so that all of it reads as NaN.
    """
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=LOWEST_PEAK) / HIGHEST[dtype]
    numbers = torch.where(scales < torch.inf, x * (1 / scales), 0.0)
    if dtype == torch.int8:
        numbers = (numbers + 0.5).floor()  # to nearest
    return numbers.to(dtype), scales.squeeze(-1)


# endregion
