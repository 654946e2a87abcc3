"""What must be settled before Triton is imported. Nothing else in the project sets Triton's variables."""

import os
import sys

import torch


def prepare_triton() -> bool:
    """Have Triton interpret its kernels on the CPU if torch sees no GPU. Returns whether kernels are interpreted.

    Triton decides when a kernel is defined, and some of its own functions are defined when it is imported, so this
    comes first; RuntimeError if it comes too late. On a machine with a GPU kernels are compiled, unless someone set
    TRITON_INTERPRET by hand.
    """
    # Triton 3.9 warns on every start that 3.10 will stop fusing a multiplication and an addition. Fused, as ever.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    if not interpreted and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise RuntimeError(
                "torch sees no GPU, and Triton was imported before it could be told to interpret its kernels. Call "
                "prepare_triton() first, or set TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"
        interpreted = True
    return interpreted
