"""The linear layers of a decoder, and layers whose weight has several formats."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.streams import Matrix
from phase2_prefill_decode.linear import Linear


class Product(Protocol):
    """rows @ weight.T + bias, written to `out` if that is given."""

    def __call__(self, rows: Tensor, out: Tensor | None = None, /) -> Tensor: ...


@runtime_checkable
class Several(Protocol):
    """A layer that is computed by several linear layers."""

    linears: list[Linear]


@runtime_checkable
class Compiled(Protocol):
    """A product with kernels of its own."""

    def compile(self) -> None:
        """Compile all variants, which would happen at their first launch."""


class Wrapped:
    """A linear layer with another product, which wraps its own."""

    def __init__(self, linear: Linear, wrap: Callable[[Product], Product]) -> None:
        self.linear, self.kernel = linear, linear.kernel
        self._product = wrap(linear)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(rows, out)


class Joined:
    """Several linear layers with the same input: their results are concatenated."""

    def __init__(self, weights: Sequence[Matrix], bias: Tensor | None, make: Callable[..., Linear]) -> None:
        biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
        self.linears = [make(weight, own) for weight, own in zip(weights, biases, strict=True)]
        self.kernel = " and ".join(dict.fromkeys(each.kernel for each in self.linears))

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.cat([each(rows) for each in self.linears], -1, out=out)


def linears_of(decoder: Decoder) -> list[list[Linear]]:
    """The linear layers of each layer: qkv_proj, o_proj, gate_up_proj and down_proj, if it is the core's."""
    return [layer.linears for layer in decoder.layers]


def products_of(linear: Linear) -> list[Linear]:
    """The products inside a linear layer: several, if it has several weights."""
    if isinstance(linear, Wrapped):
        return products_of(linear.linear)
    return linear.linears if isinstance(linear, Several) else [linear]


def every_product(decoder: Decoder) -> Iterator[Linear]:
    """The products of a whole decoder."""
    for linear in (*chain(*linears_of(decoder)), decoder.lm_head):
        yield from products_of(linear)
