"""Phase 5, deciding: the scheduler and its policies, the loop, and the simulator that runs both without a model."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
