"""What an assertion says of two tensors that should be equal: their shapes, or the first place where they differ."""

from typing import Any

import torch


def difference(found: Any, wanted: Any, *axes: str) -> str:
    """Nothing if two tensors or arrays are equal, NaN included. `axes` name the parts of a place."""
    found, wanted = torch.as_tensor(found).cpu(), torch.as_tensor(wanted).cpu()
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"expected {wanted.dtype} {list(wanted.shape)}, got {found.dtype} {list(found.shape)}"
    differ = (found != wanted) & ~(found.isnan() & wanted.isnan())
    for place in differ.nonzero()[:1].tolist():
        named = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
        values = f"expected {wanted[*place].item()}, got {found[*place].item()}"
        return f"at {named}: {values} ({int(differ.sum())} of {differ.numel()} differ)"
    return ""
