"""The backends by the names that `every_backend` of phase 1 gives."""

import torch

from phase2_prefill_decode.backend import TORCH, Backend, triton_backend
from phase2_prefill_decode.connect import backend_for

CPU = backend_for(torch.device("cpu"))


def backend_of(name: str) -> Backend:
    return triton_backend() if name == "triton" else {"reference": TORCH, "cpu": CPU}[name]
