"""A driver for Triton without a device: kernels are bound, specialised and compiled as for an H200, and never run.

So the host's part of a launch takes the time that it takes. Call `use_no_device` before anything imports a kernel, in a
process of its own.
"""

import os
from collections import Counter
from typing import Any

from phase1_kv_pool.kernels import interpret

MAX_SHARED = 227 * 1024  # bytes that a program may have on an H200
LAUNCHES: Counter[str] = Counter()  # by kernel


class Launcher:
    """Counts the launches of a compiled kernel, in place of the compiled function that calls CUDA."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name: str = metadata.name

    def __call__(self, *arguments: Any) -> None:
        LAUNCHES[self.name] += 1


class Utils:
    """What Triton asks of a device when it loads a kernel."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """The module, the function, its registers, its spills, and the threads that a program may have."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED}


class Driver:
    """The part of a driver that `kernel[grid](...)` uses."""

    utils = Utils()
    launcher_cls = Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def use_no_device() -> None:
    """Give Triton this driver, and tensors of the CPU the kernels of a GPU."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    triton.runtime.driver.set_active(Driver())
    interpret.prepare_triton = lambda: False
