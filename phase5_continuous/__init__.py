"""Phase 5, deciding: the scheduler and its policies, admission, and the requests that run."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
