"""Ways: one operation written three times, and the choice between them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from phase1_kv_pool.kernels.prepare import prepare_triton

WAYS = ("reference", "cpu", "triton")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Ways(Generic[Function]):
    """An operation three ways, with one signature and one answer.

    reference   what it means, to be checked by eye; any device
    cpu         as fast as it gets on a CPU
    triton      the kernel for a GPU

    "module:function" is imported when it is first asked for: a server on a CPU never loads Triton.
    """

    reference: Function
    cpu: Function | str
    triton: str

    def load(self, way: str) -> Function:
        """The function of one of WAYS."""
        if way not in WAYS:
            raise ValueError(f"a way is one of {', '.join(WAYS)}, got {way!r}")
        if way == "triton":
            prepare_triton()
        function: Function | str = getattr(self, way)
        if not isinstance(function, str):
            return function
        module, _, name = function.partition(":")
        loaded: Function = getattr(importlib.import_module(module), name)
        return loaded

    def on(self, device: torch.device) -> Function:
        """The function for tensors on this device. The whole policy: triton on a GPU, cpu on a CPU."""
        return self.load("triton" if device.type == "cuda" else "cpu")


def place_to_try(way: str) -> torch.device:
    """The device on which a test tries a way: Triton's is compiled on the GPU if there is one, else interpreted."""
    return torch.device("cuda" if way == "triton" and torch.cuda.is_available() else "cpu")
