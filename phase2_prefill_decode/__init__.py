"""Phase 2, prefill and decode: the model over the pool, its kernels, sampling, and what a step costs.

What needs no torch is handed on here. Of the rest: `Engine` is in `engine`, `Model` in `model`, `Decoder` in `decoder`,
`ModelRunner` in `runner`, `Sampler` in `sampler`, `Stepper` in `stepper`, `load_weights` in `weights`.
"""

from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.cost import Cost, CostModel, Load, Part
from phase2_prefill_decode.fields import ConfigError
from phase2_prefill_decode.roofline import DEVICES, Device, Prediction, crossover, measured, named, predict

__all__ = [
    "DEVICES",
    "ConfigError",
    "Cost",
    "CostModel",
    "Device",
    "Load",
    "ModelConfig",
    "Part",
    "Prediction",
    "crossover",
    "measured",
    "named",
    "predict",
]
