"""Phase 3, sharing a step: the token budget, and the chunker that divides it between decodes and prompts."""

from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker, Share

__all__ = ["Chunker", "Share", "TokenBudget"]
