"""Phase 2, prefill and decode: the model over the pool, its kernels, sampling, and what a step costs.

What needs no torch is handed on here. Of the rest: `Engine` is in `engine`, `Model` in `model`, `Decoder` in `decoder`,
`ModelRunner` in `runner`, `Sampler` in `sampler`, `Stepper` in `stepper`, `load_weights` in `weights`."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
