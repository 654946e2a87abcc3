"""POST /v1/embeddings, computed from a generating model's hidden states by the core's completions."""
