"""Phase 4, remembering: the radix tree and the prefix cache over it. Not yet built."""
