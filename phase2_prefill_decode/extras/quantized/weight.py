"""QuantizedWeight: a matrix in 8 or 4 bits a number, with scales. Every format is brought into this one.

weight[o, i] = (values[o, i] - zeros[o, i // group]) * scales[o, i // group]
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

MIDDLE = 8  # the number that stands for 0 in 4 bits, where there are no zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [out, in]. The group is the number of inputs that share a scale: the whole row, if the scales are
    [out, 1]."""

    values: Tensor  # int8 or float8_e4m3fn [out, in]; or uint8 [out, in / 2]: 4 bits, the low ones first, 0 to 15
    scales: Tensor  # [out, in / group]
    zeros: Tensor | None = None  # [out, in / group], whole numbers in the dtype of the scales
    offsets: Tensor | None = None  # [out, in / group], without zeros: weight = values * scales - offsets
    order: Tensor | None = None  # int64 [in]: column i belongs to input order[i], so a product takes rows[:, order]
    dtype: torch.dtype = torch.bfloat16  # what products are computed in
    file_scales: torch.dtype | None = None  # of the scales in the file, if they were widened

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values), self.values.shape[1] * 8 // self.bits))

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def stored_scales(self) -> torch.dtype:
        """The narrowest dtype that is known to hold each scale exactly."""
        return self.file_scales or self.scales.dtype

    @property
    def is_centred(self) -> bool:
        """Whether there are neither zeros nor offsets."""
        return self.zeros is None and self.offsets is None

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: str | torch.device) -> "QuantizedWeight":
        """The same weight on a device, each tensor contiguous."""
        moved = self._of_each(lambda tensor: tensor.to(device).contiguous())
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    # region exercise 9.2
    def dequantize(self) -> Tensor:
        """The weight in the dtype of its scales. Each step is computed in it, as the format's own library does."""
        values = self.values if self.bits == 8 else unpacked(self.values)
        grouped = values.to(self.scales.dtype).view(*self.scales.shape, self.group)
        if self.zeros is not None:
            grouped -= self.zeros[..., None]
        elif self.bits == 4 and self.offsets is None:
            grouped -= MIDDLE
        grouped *= self.scales[..., None]
        if self.offsets is not None:
            grouped -= self.offsets[..., None]
        ordered = grouped.flatten(1)
        if self.order is None:
            return ordered
        weight = torch.empty_like(ordered)
        weight[:, self.order] = ordered
        return weight

    # endregion

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows, dequantized, for an embedding lookup."""
        return self._of_each(lambda tensor: tensor[tokens]).dequantize().to(dtype)

    def part(self, rows: slice, columns: slice) -> "QuantizedWeight":
        """Some rows and columns. ValueError if the columns cut a group, or if the inputs have an order of their own."""
        weight = self._of_each(lambda tensor: tensor[rows])
        start, stop, _ = columns.indices(self.shape[1])
        if (start, stop) == (0, self.shape[1]):
            return weight
        per_byte, group = 8 // self.bits, self.group
        if self.order is not None:
            raise ValueError("its inputs have an order of their own, so that a part of them is in no group")
        one_group = self.scales.shape[1] == 1
        step = per_byte if one_group else group
        if start % step or stop % step:
            raise ValueError(f"columns {start} to {stop} cut a group of {step}")
        groups = slice(0, 1) if one_group else slice(start // group, stop // group)
        values = weight.values[:, start // per_byte : stop // per_byte]
        of_groups: dict[str, Any] = {n: t[:, groups] for n, t in weight.by_rows().items() if n != "values"}
        return replace(weight, values=values, **of_groups)

    def in_order(self, order: Tensor | None) -> "QuantizedWeight":
        """The same weight, with its groups of inputs in this order; None: they already are."""
        if order is None:
            return self
        values = self.values[:, order] if self.bits == 8 else packed(unpacked(self.values)[:, order])
        return replace(self, values=values, order=order)

    def with_rows(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> "QuantizedWeight":
        """The same with other rows, on their device, for products in a dtype."""
        order, changed = self.order, dict[str, Any](tensors)
        return replace(
            self, dtype=dtype, order=None if order is None else order.to(tensors["values"].device), **changed
        )

    def joins(self, other: Any) -> bool:
        """Whether the rows of both can form one weight."""
        if not isinstance(other, QuantizedWeight):
            return False
        ours, theirs = self._tensors(), other._tensors()
        if ours.keys() != theirs.keys() or (self.order is not None and not torch.equal(self.order, theirs["order"])):
            return False
        kinds = [(ours[name].dtype, ours[name].shape[1:], theirs[name].dtype, theirs[name].shape[1:]) for name in ours]
        alike = (self.dtype, self.file_scales) == (other.dtype, other.file_scales)
        return alike and all(kind[:2] == kind[2:] for kind in kinds)

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """With other tensors, except for the order."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.by_rows().items()}
        return replace(self, **changed)

    def by_rows(self) -> dict[str, Tensor]:
        """Its tensors that have a row for each output."""
        return {name: tensor for name, tensor in self._tensors().items() if name != "order"}

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def packed(numbers: Tensor) -> Tensor:
    """uint8 [out, in] from 0 to 15, two to a byte."""
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def unpacked(values: Tensor) -> Tensor:
    """The numbers of `packed`."""
    return torch.stack((values & 15, values >> 4), 2).flatten(1)
