"""Model shapes for benchmarks, with random weights."""

from phase2_prefill_decode.loading.config import ModelConfig

# Qwen3's architecture in two sizes: the small one shows the overhead of the engine, the large one is memory-bound.
SHAPES = {
    "17m": ModelConfig(
        model_type="qwen3", vocab_size=8192, num_hidden_layers=8, hidden_size=384, intermediate_size=1152,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        qk_norm=True, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "596m": ModelConfig(
        model_type="qwen3", vocab_size=151_936, num_hidden_layers=28, hidden_size=1024, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        qk_norm=True, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
}  # fmt: skip
