"""Triton without a GPU: its interpreter runs the kernels."""

import os
import sys

import torch


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
