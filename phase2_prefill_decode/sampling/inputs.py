"""SamplingInputs: the parameters of the draw, one column each. This module is their only way to the device.

`pack_inputs` writes the columns of a step's requests into one array of 32-bit words. The array travels with the other
integers of the step, and the kernels get views of it.

A draw is a pure function of the logits, the request's seed and the token's position. There is no generator state, so no
other request of the batch can change it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

import torch
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
        """The columns of an array, as views: on the host to write them, on the device to draw."""
        rows = len(words) // WORDS
        words = words if rows else words.new_empty(0)  # an empty slice may have a stride of 0
        wide, narrow = words.split_with_sizes([4 * rows, 4 * rows])
        keys, positions = wide.view(torch.int64).view(2, rows).unbind()
        temperatures, top_p, min_p = narrow[: 3 * rows].view(torch.float32).view(3, rows).unbind()
        return cls(temperatures, top_p, min_p, narrow[3 * rows :], keys, positions)

    def first(self, rows: int) -> "SamplingInputs":
        """The parameters of the first rows."""
        return self if rows == len(self.keys) else SamplingInputs(*(column[:rows] for column in self._columns()))

    def _columns(self) -> list[Tensor]:
        return [getattr(self, column.name) for column in fields(self)]


def pack_inputs(requests: Sequence[Request], totals: Sequence[int], key: Callable[[Request], int]) -> Tensor:
    """The words of these requests. `totals` are the positions to draw, `key` is a request's seed."""
    words = torch.zeros(WORDS * len(requests), dtype=torch.int32)
    inputs, params = SamplingInputs.read(words), [request.params for request in requests]
    if requests:
        inputs.temperatures[:] = torch.tensor([0 if is_greedy(p) else max(p.temperature, COLDEST) for p in params])
        inputs.top_p[:] = torch.tensor([p.top_p for p in params])
        inputs.min_p[:] = torch.tensor([p.min_p for p in params])
        inputs.top_k[:] = torch.tensor([p.top_k for p in params])
        inputs.keys[:] = torch.tensor([signed(key(request)) for request in requests])
        inputs.positions[:] = torch.tensor(totals)
    return words


def pad_inputs(words: Tensor, size: int) -> Tensor:
    """The words with more rows, which are greedy."""
    padded, rows = torch.zeros(WORDS * size, dtype=torch.int32), len(words) // WORDS
    for column, given in zip(
        SamplingInputs.read(padded).first(rows)._columns(), SamplingInputs.read(words)._columns(), strict=True
    ):
        column.copy_(given)
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
