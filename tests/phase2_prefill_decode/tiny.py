"""A model so small that a benchmark with it takes a moment."""

from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig

TINY = ModelConfig(
    vocab_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    hidden_size=16,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    qk_norm=True,
    dtype="float32",
)


def windowed(*windows: int | None) -> tuple[LayerConfig, ...]:
    """Layers with these windows."""
    return tuple(LayerConfig(window=window) for window in windows)
