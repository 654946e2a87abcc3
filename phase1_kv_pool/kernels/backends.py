"""Backends: one operation with three implementations, and the choice between them."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

BACKENDS = ("reference", "cpu", "triton")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Backends(Generic[Function]):
    """The implementations of one operation. All have the same signature and give the same result.

    reference   plain torch, to be checked by eye; any device
    cpu         the fast path on a CPU
    triton      the kernel for a GPU

    "module:function" is imported on first use: a server on a CPU never loads Triton.
    """

    reference: Function
    cpu: Function | str
    triton: str

    def load(self, backend: str) -> Function:
        """Return the implementation of one of BACKENDS."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "triton":
            prepare_triton()
        function: Function | str = getattr(self, backend)
        if not isinstance(function, str):
            return function
        module, _, name = function.partition(":")
        loaded: Function = getattr(importlib.import_module(module), name)
        return loaded

    def on(self, device: torch.device) -> Function:
        """Return the implementation for tensors on this device: triton on a GPU, cpu on a CPU."""
        return self.load("triton" if device.type == "cuda" else "cpu")


def prepare_triton() -> bool:
    """Make Triton interpret its kernels on the CPU if torch sees no GPU. Returns whether kernels are interpreted.

    This must run before Triton is imported, because Triton decides when a kernel is defined and defines some functions
    at import; a later call raises RuntimeError. On a machine with a GPU, kernels are compiled unless TRITON_INTERPRET
    is set. Nothing else in the project sets Triton's variables.
    """
    # Triton 3.9 warns at import that 3.10 will stop fusing multiply and add. Keep the fusion.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    if not interpreted and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise RuntimeError(
                "torch sees no GPU, and Triton was imported before it was set to interpret its kernels. Call "
                "prepare_triton() first, or set TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"
        interpreted = True
    return interpreted
