"""Phase 3, sharing a step: the token budget, and the chunker that divides it between decodes and prompts."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
