"""Linear layers: rows @ weight.T + bias. The weights are the same in every step, so a backend may pack them once."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear


class Linear(Protocol):
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out]."""

    @property
    def kernel(self) -> str:
        """The name of the kernel that multiplies."""

    def __call__(self, rows: Tensor, out: Tensor | None = None, /) -> Tensor:
        """Write the result to `out` if it is given; it must be contiguous."""


@runtime_checkable
class Table(Protocol):
    """An embedding that is not a plain tensor."""

    def rows(self, tokens: Tensor, dtype: torch.dtype, /) -> Tensor: ...


class TorchLinear:
    """The product of torch, on any device."""

    kernel = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return linear(rows, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=out)
        return torch.addmm(self.bias, rows, self.weight.t(), out=out)

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, where it is also the embedding."""
        return embedding(tokens, self.weight)
