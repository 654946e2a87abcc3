"""A recorder with the semantics of a CUDA graph, on a CPU: the same operators again, over the same memory.

It takes the place of `cuda_record`. Before each replay everything that any capture has allocated is poisoned, for
graphs share that memory and nothing in it outlives the next replay. What a capture may not do raises: reading the
device, and bringing numbers from the host. Kernels of Triton are interpreted, a launch is one operator.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.phase1_kv_pool import support  # noqa: F401  (before Triton: its kernels are interpreted, and faster)

Result = TypeVar("Result")

READS = {"cpu", "numpy", "tolist"}  # methods of a tensor that no operator shows
SAME_SHAPE = {"aten::index", "aten::index_put", "aten::index_put_"}  # unless an index is a mask


class NotCapturedError(RuntimeError):
    """An operation that a CUDA graph cannot capture."""


def refuse(name: str) -> NoReturn:
    raise NotCapturedError(f"{name} while a step is captured: the host must not wait for the device")


class NoReads(TorchFunctionMode):
    """Refuses the methods that read a tensor without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            refuse(func.__name__)
        return func(*args, **(kwargs or {}))


class Capture(TorchDispatchMode):
    """Lists the operators that run, each as a call that does the same on the same memory."""

    def __init__(self, allocated: dict[int, Tensor], run_kernel: Callable[..., None]) -> None:
        """`allocated` takes what the operators allocate, by address."""
        super().__init__()
        self.run_kernel = run_kernel
        self.calls: list[Callable[[], Any]] = []
        self.allocated = allocated
        self._in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._in_kernel:  # the interpreter's own
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        check(func, given, kwargs)
        result = func(*args, **kwargs)
        call = partial(func, *args, **kwargs)
        inputs = {address(tensor) for tensor in given}
        new = {address(tensor): tensor for tensor in tensors(result) if address(tensor) not in inputs}
        if func._schema.is_mutable:
            self.calls.append(call)
        elif new:  # else it is a view, which needs no call
            self.allocated.update(new)
            self.calls.append(partial(again, call, tensors(result)))
        return result

    def launch(self, *args: Any, **options: Any) -> None:
        """Launch a kernel of Triton."""
        self._in_kernel = True
        with torch._C.DisableTorchFunction():
            self.run_kernel(*args, **options)
        self._in_kernel = False
        self.calls.append(partial(self.run_kernel, *args, **options))


class Recorder:
    """Records steps that share the memory of their intermediate results."""

    def __init__(self) -> None:
        self.allocated: dict[int, Tensor] = {}  # by all captures
        self.replays = 0

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        from triton.runtime.interpreter import InterpretedFunction

        run()
        capture = Capture(self.allocated, InterpretedFunction.run)

        def launch(*args: Any, **options: Any) -> None:
            capture.launch(*args, **options)

        with patch.object(InterpretedFunction, "run", launch), NoReads(), capture:
            result = run()

        def replay() -> Result:
            self.replays += 1
            with torch.inference_mode():
                for tensor in self.allocated.values():
                    poison(tensor)
                for call in capture.calls:
                    call()
            return result

        return replay


def check(func: Any, given: list[Tensor], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator whose result the host must wait for, or whose input is memory of the host."""
    name, known = func._schema.name, kwargs.get("output_size") is not None
    by_content = torch.Tag.dynamic_output_shape in func.tags and name not in SAME_SHAPE and not known
    masked = name in SAME_SHAPE and any(tensor.dtype is torch.bool for tensor in given[1:])
    if torch.Tag.data_dependent_output in func.tags or by_content or masked or name == "aten::lift_fresh":
        refuse(name)


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def again(call: Callable[[], Any], results: list[Tensor]) -> None:
    """Compute an operator again, into the memory of its first results."""
    for old, new in zip(results, tensors(call()), strict=True):
        old.copy_(new)


def poison(tensor: Tensor) -> None:
    """Fill the memory of a tensor with NaN, or with ones: wrong, but an index that a kernel may follow without reading
    outside of all memory, which would end the interpreter and not the test."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    whole.fill_(math.nan if tensor.is_floating_point() else 1)
