"""Shared by the kernel tests: which backend is tested on which device, in which dtypes."""

import importlib.util
import os
import platform
import sys
from typing import Any

import pytest
import torch

from phase1_kv_pool.kernels import BACKENDS, prepare_triton

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none")

# On platforms with a Triton wheel it must be installed: a test that needs it fails without it.
_HAS_TRITON_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
_without_triton = pytest.mark.skipif(
    not _HAS_TRITON_WHEEL and importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def interpret_faster() -> None:
    """Skip work of Triton's interpreter that changes no result. It patches the members of `triton.language` for each
    launch, and again for each call of a function within a kernel: once a launch is enough. It looks for overflows and
    drops what it finds, for it reports them only in a debug mode. It makes a table of types to look up one, and checks
    the shape of a block for each result."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        done = not any(tl.core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if done else patch(function)

    def known_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    blocks: dict[Any, Any] = {}
    make_block = tl.block_type.__init__

    def known_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(map(int, shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    tl.block_type.__init__ = known_block
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_dtype
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" if "triton" in sys.modules else prepare_triton()
if _INTERPRETED and importlib.util.find_spec("triton") is not None:
    interpret_faster()


def every_backend_and_dtype() -> list[Any]:
    """Parameters (backend, dtype). Triton's interpreter gets bfloat16 wrong, so there it waits for a GPU."""
    params = []
    for backend in BACKENDS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            marks = [_without_triton] if backend == "triton" else []
            if backend == "triton" and dtype == torch.bfloat16:
                marks += [pytest.mark.gpu, needs_gpu]
            params.append(
                pytest.param(backend, dtype, marks=marks, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
            )
    return params


def every_backend() -> list[Any]:
    return [pytest.param(backend, marks=[_without_triton] if backend == "triton" else []) for backend in BACKENDS]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, on the CPU: NaN equals NaN, and 0 differs from -0."""
    return tensor.cpu().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
