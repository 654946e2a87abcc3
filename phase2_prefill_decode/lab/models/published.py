"""The config.json of published models, without what the engine does not read."""

from typing import Any

import phase2_prefill_decode.connect  # noqa: F401  (adds the families of extras)
from phase2_prefill_decode.loading.config import ModelConfig

_LLAMA = {"vocab_size": 32_000, "num_attention_heads": 32, "num_hidden_layers": 32, "hidden_size": 4096}
_GEMMA = {"model_type": "gemma3_text", "vocab_size": 262_144, "head_dim": 256, "num_attention_heads": 4,
          "num_key_value_heads": 1, "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1e6,
          "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256}  # fmt: skip
_QWEN3_6 = {"vocab_size": 248_320, "head_dim": 256, "linear_num_key_heads": 16, "rope_theta": 1e7,
            "max_position_embeddings": 262_144}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {
        **_LLAMA, "model_type": "llama", "intermediate_size": 11_008, "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "Llama-2-70B": {
        **_LLAMA, "model_type": "llama", "intermediate_size": 28_672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 80, "hidden_size": 8192, "max_position_embeddings": 4096,
    },
    "Llama-3.1-8B": {
        **_LLAMA, "model_type": "llama", "vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "vocab_size": 151_936, "num_hidden_layers": 36, "hidden_size": 4096,
        "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_theta": 1e6, "max_position_embeddings": 40_960,
    },
    "OLMo-2-7B": {
        **_LLAMA, "model_type": "olmo2", "vocab_size": 100_352, "intermediate_size": 11_008,
        "num_key_value_heads": 32, "max_position_embeddings": 4096, "rope_theta": 5e5,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "vocab_size": 128_256, "num_hidden_layers": 36, "hidden_size": 2048,
        "intermediate_size": 11_008, "num_attention_heads": 16, "num_key_value_heads": 4,
        "no_rope_layer_interval": 4, "rope_theta": 5e6, "max_position_embeddings": 65_536,
    },
    "Granite-3.3-8B": {
        **_LLAMA, "model_type": "granite", "vocab_size": 49_159, "num_hidden_layers": 40, "intermediate_size": 12_800,
        "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 1e7, "max_position_embeddings": 131_072,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
    },
    "Gemma-3-270M": {
        **_GEMMA, "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048,
        "max_position_embeddings": 32_768,
    },
    "Gemma-3-1B": {
        **_GEMMA, "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32_768,
    },
    "Gemma-3-27B": {  # the text part
        **_GEMMA, "vocab_size": 262_208, "num_hidden_layers": 62, "hidden_size": 5376, "intermediate_size": 21_504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "query_pre_attn_scalar": 168, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131_072,
    },
    "Phi-3-mini": {
        **_LLAMA, "model_type": "phi3", "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_key_value_heads": 32, "sliding_window": 2047, "max_position_embeddings": 4096,
    },
    "Ministral-3-8B": {  # the text part
        "model_type": "ministral3", "vocab_size": 131_072, "num_hidden_layers": 34, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "Olmo-3-7B": {
        **_LLAMA, "model_type": "olmo3", "vocab_size": 100_278, "intermediate_size": 11_008, "num_key_value_heads": 32,
        "sliding_window": 4096, "max_position_embeddings": 65_536, "rope_theta": 5e5,
    },
    "Mixtral-8x7B": {
        **_LLAMA, "model_type": "mixtral", "intermediate_size": 14_336, "num_key_value_heads": 8, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32_768,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "vocab_size": 50_304, "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201_088, "num_hidden_layers": 24, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131_072,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Qwen3.5-9B": {  # the text part
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 12_288, "num_attention_heads": 16, "max_position_embeddings": 262_144,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2", "vocab_size": 65_536, "num_hidden_layers": 16, "hidden_size": 2048,
        "block_ff_dim": 12_288, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "rope_theta": 1e6,
        "max_position_embeddings": 128_000,
    },
    "Qwen3.6-27B": {  # the text part
        **_QWEN3_6, "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120,
        "intermediate_size": 17_408, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
    "Qwen3.6-35B-A3B": {  # the text part
        **_QWEN3_6, "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip


def published(name: str) -> ModelConfig:
    """The configuration of a published model, as the engine reads it."""
    return ModelConfig.from_dict(PUBLISHED[name], "bfloat16")
