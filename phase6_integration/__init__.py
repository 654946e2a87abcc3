"""Phase 6, serving: an engine of all the phases, in this process or in one of its own, and a server before it."""

from typing import TYPE_CHECKING, Any

from phase0_request.params import SamplingParams
from phase6_integration.answers import Ask, Delta
from phase6_integration.async_engine import AsyncEngine, Health, Reply, UnavailableError
from phase6_integration.options import EngineOptions

if TYPE_CHECKING:
    from phase6_integration.engine import NanoServingEngine

__all__ = [
    "Ask",
    "AsyncEngine",
    "Delta",
    "EngineOptions",
    "Health",
    "NanoServingEngine",
    "Reply",
    "SamplingParams",
    "UnavailableError",
]


def __getattr__(name: str) -> Any:
    """The engine in this process needs torch, which takes seconds to load; the front of a server does without."""
    if name == "NanoServingEngine":
        from phase6_integration.engine import NanoServingEngine

        return NanoServingEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
