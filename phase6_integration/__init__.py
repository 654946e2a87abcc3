"""Phase 6, serving: an engine of all the phases, in this process or in one of its own, and a server before it."""

from phase0_request.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
