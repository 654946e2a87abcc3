"""Shapes of models to measure with: nothing learned, as large as ones that have."""

from phase2_prefill_decode.config import ModelConfig

# Qwen3's architecture in two sizes: one that is all memory traffic, one that shows what an engine itself costs.
SHAPES = {
    "17m": ModelConfig(
        family="qwen3", vocab_size=8192, n_layer=8, n_embd=384, n_inner=1152, n_head=6, n_kv_head=2, head_dim=64,
        qk_norm=True, tied=True, max_length=8192,
    ),
    "596m": ModelConfig(
        family="qwen3", vocab_size=151_936, n_layer=28, n_embd=1024, n_inner=3072, n_head=16, n_kv_head=8, head_dim=128,
        qk_norm=True, tied=True, max_length=8192,
    ),
}  # fmt: skip
