"""SamplingInputs: the parameters of the draw, one column each.

`pack_columns` makes the columns of a step's requests. They travel with the other arrays of the step.

A draw is a pure function of the logits, the request's seed and the token's position. There is no generator state, so no
other request of the batch can change it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request

COLDEST = 1e-30  # smaller temperatures would be 0 in float32; at this one only the likeliest token has weight


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of each row."""

    keys: Tensor  # [rows] int64; the seed of the row's request
    positions: Tensor  # [rows] int64; of the token to draw, in its request
    top_k: Tensor  # [rows] int32; 0: off
    temperatures: Tensor  # [rows] float32; 0: greedy, the lowest id of the largest logits
    top_p: Tensor  # [rows] float32; 1: off
    min_p: Tensor  # [rows] float32; 0: off

    def first(self, rows: int) -> "SamplingInputs":
        """The parameters of the first rows."""
        return self if rows == len(self.keys) else SamplingInputs(*(getattr(self, n)[:rows] for n in self.__slots__))


Columns = tuple[NDArray[Any], ...]  # the fields of SamplingInputs on the host, in their order


def pack_columns(requests: Sequence[Request], totals: Sequence[int], key: Callable[[Request], int]) -> Columns:
    """The columns of these requests. `totals` are the positions to draw, `key` is a request's seed."""
    params = [request.params for request in requests]
    return (
        np.array([signed(key(request)) for request in requests], np.int64),
        np.array(totals, np.int64),
        np.array([p.top_k for p in params], np.int32),
        np.array([0 if is_greedy(p) else max(p.temperature, COLDEST) for p in params], np.float32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
    )


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the likeliest token (of equals the lowest id). `top_k=1` is greedy too."""
    return params.temperature == 0 or params.top_k == 1


def signed(number: int) -> int:
    """The 64 bits of a number as torch's int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def key_of(name: str, entropy: bytes) -> int:
    """A key for a request without a seed: the same for one request id and one entropy, in every process."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=entropy).digest(), "big")
