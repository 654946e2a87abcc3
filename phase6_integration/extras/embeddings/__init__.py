"""POST /v1/embeddings, from the hidden states of a model that generates, over the completions of the core."""
