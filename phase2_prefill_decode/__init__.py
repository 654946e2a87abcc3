"""Phase 2, prefill and decode: the model over the pool, its kernels, and the sampler.

The names that need no torch are exported here. Of the others, `Engine` is in `engine`, `Model` in `model`,
`Decoder` in `decoder`, `ModelRunner` in `step.runner`, `Sampler` in `sampling.sampler`, `load_weights` in
`loading.weights`.
"""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
