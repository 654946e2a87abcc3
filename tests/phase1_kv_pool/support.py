"""Shared by the kernel tests of this phase and later ones: which implementation runs on which device and dtype."""

import importlib.util
import platform
import sys
from typing import Any

import pytest
import torch

from phase1_kv_pool.kernels import WAYS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none")

# On platforms with a Triton wheel it must be installed: a test that needs it fails without it.
_HAS_TRITON_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
_without_triton = pytest.mark.skipif(
    not _HAS_TRITON_WHEEL and importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def every_way_and_dtype() -> list[Any]:
    """Parameters (way, dtype). Triton's interpreter computes bfloat16 incorrectly, so that needs a GPU."""
    params = []
    for way in WAYS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            marks = [_without_triton] if way == "triton" else []
            if way == "triton" and dtype == torch.bfloat16:
                marks += [pytest.mark.gpu, needs_gpu]
            params.append(pytest.param(way, dtype, marks=marks, id=f"{way}-{str(dtype).removeprefix('torch.')}"))
    return params


def every_way() -> list[Any]:
    return [pytest.param(way, marks=[_without_triton] if way == "triton" else []) for way in WAYS]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, on the CPU: NaN equals NaN, and 0 differs from -0."""
    return tensor.cpu().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
