"""Copies between the host and a device that do not wait for the device's pending work."""

import torch
from torch import Tensor


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; on a CPU the tensor itself."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """Move to pinned memory, which a GPU copies from while the host goes on."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def to_host(numbers: Tensor) -> Tensor:
    """Start a copy to the host. The original may be written again."""
    if not numbers.is_cuda:
        return numbers.clone()
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return copy.copy_(numbers, non_blocking=True)
