"""SamplingInputs: the parameters of the draw, one column each. This module is their only way to the device.

`pack_inputs` writes the columns of a step's requests into one array of 32-bit words. The array travels with the other
integers of the step, and the kernels get views of it.

A draw is a pure function of the logits, the request's seed and the token's position. There is no generator state, so no
other request of the batch can change it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request

WORDS = 8  # of 32 bits, for the parameters of a row: two columns of 64 bits, four of 32
COLDEST = 1e-30  # smaller temperatures would be 0 in float32; at this one only the likeliest token has weight


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of each row."""

    temperatures: Tensor  # [rows] float32; 0: greedy, the lowest id of the largest logits
    top_p: Tensor  # [rows] float32; 1: off
    min_p: Tensor  # [rows] float32; 0: off
    top_k: Tensor  # [rows] int32; 0: off
    keys: Tensor  # [rows] int64; the seed of the row's request
    positions: Tensor  # [rows] int64; of the token to draw, in its request

    @classmethod
    def read(cls, words: Tensor) -> "SamplingInputs":
        """The columns of an array on the device, as views."""
        rows = len(words) // WORDS
        words = words if rows else words.new_empty(0)  # an empty slice may have a stride of 0
        wide, narrow = words.split_with_sizes([4 * rows, 4 * rows])
        keys, positions = wide.view(torch.int64).view(2, rows).unbind()
        temperatures, top_p, min_p, top_k = narrow.view(4, rows).unbind()
        temperatures, top_p, min_p = (column.view(torch.float32) for column in (temperatures, top_p, min_p))
        return cls(temperatures, top_p, min_p, top_k, keys, positions)

    def first(self, rows: int) -> "SamplingInputs":
        """The parameters of the first rows."""
        if rows == len(self.keys):
            return self
        return SamplingInputs(*(getattr(self, column.name)[:rows] for column in fields(self)))


def columns_of(words: NDArray[np.int32]) -> tuple[NDArray[Any], ...]:
    """The same columns on the host, as views."""
    rows = len(words) // WORDS
    wide, narrow = words[: 4 * rows].view(np.int64).reshape(2, rows), words[4 * rows :].reshape(4, rows)
    return (*narrow[:3].view(np.float32), narrow[3], *wide)


def pack_inputs(requests: Sequence[Request], totals: Sequence[int], key: Callable[[Request], int]) -> NDArray[np.int32]:
    """The words of these requests. `totals` are the positions to draw, `key` is a request's seed."""
    words, params = np.zeros(WORDS * len(requests), np.int32), [request.params for request in requests]
    temperatures, top_p, min_p, top_k, keys, positions = columns_of(words)
    temperatures[:] = [0 if is_greedy(p) else max(p.temperature, COLDEST) for p in params]
    top_p[:], min_p[:], top_k[:] = [p.top_p for p in params], [p.min_p for p in params], [p.top_k for p in params]
    keys[:], positions[:] = [signed(key(request)) for request in requests], totals
    return words


def move_inputs(words: NDArray[np.int32], totals: Sequence[int]) -> NDArray[np.int32]:
    """The words of the same requests at other positions."""
    words = words.copy()
    columns_of(words)[-1][:] = totals
    return words


def pad_inputs(words: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """The words with more rows, which are greedy."""
    padded = np.zeros(WORDS * size, np.int32)
    for column, given in zip(columns_of(padded), columns_of(words), strict=True):
        column[: len(given)] = given
    return padded


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the likeliest token (of equals the lowest id). `top_k=1` is greedy too."""
    return params.temperature == 0 or params.top_k == 1


def signed(number: int) -> int:
    """The 64 bits of a number as torch's int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def key_of(name: str, entropy: bytes) -> int:
    """A key for a request without a seed: the same for one request id and one entropy, in every process."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=entropy).digest(), "big")
