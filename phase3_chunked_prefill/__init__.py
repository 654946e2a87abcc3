"""Phase 3, sharing a step: the token budget, the chunker, the ragged attention kernel. Not yet built."""
