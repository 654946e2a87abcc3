"""A GPU that is not there, for tests of Triton kernels: their tensors say that they lie on its device, and are computed
on the CPU, by Triton's interpreter. As on a GPU, an operator or a kernel refuses tensors of two devices, and a kernel
is launched while the device of its tensors is the current one.

`python -m pytest -p tests.gpu.pretend FILES` runs tests so. The device has number 1, and 0 is current.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 1)
CURRENT = [0]
NEEDS_NO_GPU = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_"}  # may take tensors of the CPU too


class OnGPU(torch.Tensor):
    """A tensor that says it is on the GPU, over one that lies on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnGPU":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        tensor: OnGPU = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device="meta")  # type: ignore[attr-defined]
        tensor.inner = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 1

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the GPU, outside of a test")


def unwrap(values: Any) -> Any:
    return tree_map(lambda value: value.inner if isinstance(value, OnGPU) else value, values)


def check_devices(name: str, values: Any) -> bool:
    """Whether the tensors are on the GPU; a number in a tensor may be on either device."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    on_gpu = [isinstance(tensor, OnGPU) for tensor in tensors]
    many = [isinstance(tensor, OnGPU) for tensor in tensors if tensor.dim() > 0]
    if any(on_gpu) and not all(many) and name not in NEEDS_NO_GPU:
        raise RuntimeError(f"{name} got tensors of the GPU and of the CPU")
    return any(on_gpu)


class Devices(TorchDispatchMode):
    """Computes operators on the CPU, and keeps account of the device that each result would be on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        on_gpu = check_devices(name, (args, kwargs))
        if name == "aten::copy_":
            on_gpu = isinstance(args[0], OnGPU)
        if kwargs.get("device") is not None:
            on_gpu, kwargs["device"] = kwargs["device"].type == "cuda", torch.device("cpu")
        result = func(*unwrap(args), **unwrap(kwargs))
        if func._schema.is_mutable:
            return args[0] if isinstance(result, torch.Tensor) else result
        return (
            tree_map(lambda value: OnGPU(value) if isinstance(value, torch.Tensor) else value, result)
            if on_gpu
            else result
        )


@contextmanager
def current_device(number: int) -> Iterator[None]:
    before, CURRENT[0] = CURRENT[0], CURRENT[0] if number < 0 else number
    try:
        yield
    finally:
        CURRENT[0] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with Devices():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    from phase1_kv_pool.kernels import prepare_triton

    prepare_triton()
    from triton.runtime.interpreter import InterpretedFunction

    from tests.phase1_kv_pool import support

    run, tensor = InterpretedFunction.run, torch.tensor

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not all(isinstance(tensor, OnGPU) for tensor in tensors):
            raise ValueError(f"{self.fn.__name__} got a tensor of the CPU: Triton cannot access it")
        if CURRENT != [1]:
            raise RuntimeError(f"{self.fn.__name__} is launched on device {CURRENT[0]}, its tensors are on 1")
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *unwrap(args), grid=grid, warmup=warmup, **unwrap(kwargs))

    InterpretedFunction.run = launch
    support.device_of = lambda name: GPU if name == "triton" else torch.device("cpu")
    torch.tensor = lambda data, *, device=None, **kind: tensor(data, **kind).to(device or "cpu")  # type: ignore[misc]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment, misc]
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch.cuda.device = current_device  # type: ignore[assignment, misc]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_name = lambda device=None: "pretended"
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(  # type: ignore[assignment, return-value]
        multi_processor_count=2, shared_memory_per_multiprocessor=228 * 1024
    )
