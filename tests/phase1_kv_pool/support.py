"""Shared by the kernel tests: which backend is tested on which device, in which dtypes."""

import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from phase1_kv_pool.kernels import prepare_triton

BACKENDS = "reference", "cpu", "triton"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none")

# On platforms with a Triton wheel it must be installed: a test that needs it fails without it.
_HAS_TRITON_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
_without_triton = pytest.mark.skipif(
    not _HAS_TRITON_WHEEL and importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def interpret_faster() -> None:
    """Skip work of Triton's interpreter that changes no result. It patches the members of `triton.language` for each
    launch, and again for each call of a function within a kernel: once a launch is enough. It looks for overflows and
    drops what it finds, for it reports them only in a debug mode. For each result it makes a type, checks its shape and
    wraps its sizes, and for each number in a kernel two constants: one of each kind is enough, for none is changed.

    Triton 3.6 makes an index of an array of one element in a way that NumPy 2.4 refuses: `item` works with every NumPy.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    make_constant, broadcast = TritonSemantic.scalar_constant, TritonSemantic.broadcast_impl_value
    known: dict[str, Any] = {}
    blocks: dict[Any, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    constants: dict[Any, Any] = {}

    def patch_once(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        done = not any(tl.core.is_builtin(module.load) for module in used)
        if done:
            return interpreter._LangPatchScope()
        scope = patch(function)
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        return scope

    def known_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    def known_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(map(int, shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def known_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, None, type)
            self.shape = shapes.setdefault(tuple(map(int, self.shape)), self.shape)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name])
        self.handle = handle

    def known_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = repr(value), dtype.name  # -0.0 equals 0.0
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_dtype
    tl.block_type.__init__, tl.tensor.__init__ = known_block, known_tensor
    TritonSemantic.scalar_constant, TritonSemantic.broadcast_impl_value = known_constant, broadcast_if_needed
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


def device_of(backend: str) -> torch.device:
    """The device on which tests run a backend: a GPU for Triton if there is one, else the CPU."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def skip_float8(backend: str, dtype: torch.dtype | None) -> None:
    """Triton's interpreter rounds to float8 wrongly. It reads float8 rightly."""
    if (backend, dtype) == ("triton", torch.float8_e4m3fn) and not torch.cuda.is_available():
        pytest.skip("needs a GPU: Triton's interpreter loses the carry of a mantissa that it rounds up to float8")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, on the CPU: NaN equals NaN, and 0 differs from -0."""
    return tensor.cpu().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def stored(rows: torch.Tensor, slots: Sequence[int], pages: int, page_size: int) -> torch.Tensor:
    """A pool of NaN with these rows [tokens, heads, head_dim] in their slots: written row by row into a list of all
    slots, which is then cut into pages, heads first."""
    pool = torch.full((pages * page_size, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            pool[slot] = row
    return pool.view(pages, page_size, *rows.shape[1:]).transpose(1, 2)


@st.composite
def pages_and_slots(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Pages, a page size, and slots of such a pool with padding between them."""
    page_size, pages = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 4))
    slots = draw(st.lists(st.integers(0, page_size * pages - 1), unique=True, max_size=20))
    for place in draw(st.lists(st.integers(0, len(slots)), max_size=6)):
        slots.insert(place, -1)
    return pages, page_size, slots
