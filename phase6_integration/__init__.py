"""Phase 6, integration: the engine as a Python object, in a process of its own, and behind an OpenAI-compatible API."""

from phase0_request.support.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
