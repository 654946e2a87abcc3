"""Phase 6, serving: an engine of all the phases, in this process or in one of its own, and a server before it."""

from phase0_request.params import SamplingParams
from phase6_integration.answers import Ask, Delta
from phase6_integration.async_engine import AsyncEngine, Health, UnavailableError
from phase6_integration.options import EngineOptions
from phase6_integration.reply import Reply

__all__ = [
    "Ask",
    "AsyncEngine",
    "Delta",
    "EngineOptions",
    "Health",
    "Reply",
    "SamplingParams",
    "UnavailableError",
]
