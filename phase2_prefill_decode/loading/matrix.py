"""Matrix: a weight, as a linear layer takes it. It may be read only while that layer copies or packs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Encoded(Protocol):
    """Rows of a matrix that are not plain numbers. The module that creates them also provides their product."""

    @property
    def shape(self) -> torch.Size: ...

    def __len__(self) -> int: ...

    def by_rows(self) -> dict[str, Tensor]:
        """Its tensors that have a row for each output."""

    def with_rows(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> "Encoded":
        """The same with other tensors, on their device, for products in a dtype."""

    def rows(self, tokens: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Some rows as plain numbers, as of an embedding."""

    def joins(self, other: Any) -> bool:
        """Whether the rows of the two can be those of one matrix."""


Rows = Tensor | Encoded


@dataclass(frozen=True, slots=True)
class Stream:
    """A matrix that is read while it is packed or copied, some rows at a time, and only once."""

    length: int
    parts: Iterator[Rows]
    dtype: torch.dtype  # of the products

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Rows]:
        for part in self.parts:
            yield part.to(self.dtype) if isinstance(part, Tensor) else part.with_rows(part.by_rows(), self.dtype)

    def whole(self, device: str | torch.device) -> Rows:
        """All its rows on a device, in memory that is allocated once."""
        made: dict[str, Tensor] = {}
        end = 0
        for part in self.parts:
            tensors = {"": part} if isinstance(part, Tensor) else part.by_rows()
            start, end = end, end + len(part)
            for name, tensor in tensors.items():
                if start == 0:
                    dtype = self.dtype if isinstance(part, Tensor) else tensor.dtype
                    made[name] = torch.empty((self.length, *tensor.shape[1:]), dtype=dtype, device=device)
                made[name][start:end].copy_(tensor)
        return made[""] if isinstance(part, Tensor) else part.with_rows(made, self.dtype)


Matrix = Rows | Stream | tuple[Rows | Stream, ...]
# Several: their rows, one after the other.


def joins(first: Rows, second: Rows) -> bool:
    """Whether the rows of the two can be those of one matrix."""
    return isinstance(second, Tensor) if isinstance(first, Tensor) else first.joins(second)
