"""The backend of a device, with what the extras bring to it. Without them it is one of the core."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch

from phase2_prefill_decode.backend import TORCH, Backend, triton_backend

HAS_EXTRAS = find_spec("phase2_prefill_decode.extras") is not None


def backend_for(device: torch.device) -> Backend:
    """The fastest backend for a device. numba and Triton are imported only where they are used."""
    return _gpu() if device.type == "cuda" else _cpu()


@cache
def _cpu() -> Backend:
    if not HAS_EXTRAS:
        return TORCH
    from phase2_prefill_decode.extras.cpu.backend import CPU

    return CPU


@cache
def _gpu() -> Backend:
    backend = triton_backend()
    if not HAS_EXTRAS:
        return backend
    from phase2_prefill_decode.extras.quantized.triton_product import compile_products, linear

    return replace(backend, linear=linear, compile=compile_products)
