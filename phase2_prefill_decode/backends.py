"""Connects the extras of this phase to the backend of a device."""

from dataclasses import replace
from functools import cache

import torch

from phase0_request.support.checks import has_extras
from phase2_prefill_decode.backend import TORCH, Backend, triton_backend


def backend_for(device: torch.device) -> Backend:
    """The fastest backend for a device. numba and Triton are imported only where they are used."""
    return _gpu() if device.type == "cuda" else _cpu()


@cache
def _cpu() -> Backend:
    if not has_extras("phase2_prefill_decode"):
        return TORCH
    from phase2_prefill_decode.extras.cpu.backend import CPU

    return CPU


@cache
def _gpu() -> Backend:
    backend = triton_backend()
    if not has_extras("phase2_prefill_decode"):
        return backend
    from phase2_prefill_decode.extras.quantized.triton_product import compile_products, linear

    return replace(backend, linear=linear, compile=compile_products)
