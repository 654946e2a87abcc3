"""Backend: the operations of a model on one device.

The core has two: plain torch for any device, which defines the results, and Triton for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from phase0_request.support.memory import free_bytes
from phase1_kv_pool.kernels import interpret
from phase2_prefill_decode.kernels import attention, draw, pointwise
from phase2_prefill_decode.kernels.attention import Attend
from phase2_prefill_decode.kernels.draw import Draw
from phase2_prefill_decode.kernels.pointwise import AddNorm, RotateStore, Swiglu
from phase2_prefill_decode.linear import Linear, TorchLinear
from phase2_prefill_decode.loading.weights import Weights, load_weights


class Processes(Protocol):
    """Other processes that compute a part of each step of a model."""

    def check(self) -> None:
        """Raise an error if one of them has ended."""

    def filenos(self) -> Sequence[int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of a model. Every backend takes the same arguments and gives the same results."""

    attend: Attend
    add_norm: AddNorm
    rotate_store: RotateStore
    swiglu: Swiglu
    draw: Draw
    load_weights: Callable[..., Weights] = load_weights
    linear: Callable[[Any, Tensor | None], Linear] = TorchLinear  # made of what that has loaded
    whole_step: Callable[[Any], Any] = lambda decoder: None  # see `decoder.WholeStep`
    # Compile what a decoder needs, for keys and values in a dtype (None: its own), with or without a bar.
    compile: Callable[[Any, str | None, bool], None] = lambda decoder, kv_dtype, progress: None
    free_bytes: Callable[[torch.device], int | None] = free_bytes


TORCH = Backend(
    attention.reference,
    pointwise.add_norm_reference,
    pointwise.rotate_store_reference,
    pointwise.swiglu_reference,
    draw.reference,
)


@cache
def triton_backend() -> Backend:
    """The kernels of a GPU. Nothing else imports Triton."""
    interpret.prepare_triton()
    from phase2_prefill_decode.kernels.triton.attention import attend
    from phase2_prefill_decode.kernels.triton.draw import draw
    from phase2_prefill_decode.kernels.triton.pointwise import add_norm, rotate_store, swiglu

    return Backend(attend, add_norm, rotate_store, swiglu, draw)
