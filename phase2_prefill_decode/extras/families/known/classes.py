"""The classes of transformers that load, and why others do not."""

from collections.abc import Mapping

CLASSES: Mapping[str, str] = {  # by model type
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_GEMMA4 = (
    "num_kv_shared_layers, global_head_dim and hidden_size_per_layer_input need layers that share keys, heads of two "
    "sizes, and embeddings of each layer"
)
_LATENT = "kv_lora_rank needs attention over latent keys (MLA)"
_MAMBA = "layers of Mamba need states beside the keys and values"
NEEDS: Mapping[str, str] = {  # what is missing, by the model type of a class that is asked for
    "cohere2": "layer_norm_eps needs LayerNorm, and attention and MLP beside each other",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon_h1": _MAMBA,
    "gemma2": "attn_logit_softcapping needs scores that are capped before the softmax",
    "gemma3n": _GEMMA4,
    "gemma3n_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma": "it needs a description: norms before attention and MLP only, with Gemma 3's activation",
    "glm4_moe": "n_group needs a router of sigmoids in groups, and a correction of its scores that stays in float32",
    "glm4": "partial_rotary_factor needs neighbouring numbers of a head that rotate together",
    "gpt_neox": "layer_norm_eps needs LayerNorm, and attention and MLP beside each other",
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": "num_dense_layers needs experts in layers with convolutions",
    "llama4": "attention_chunk_size needs attention in chunks, beside experts that are shared",
    "llama4_text": "attention_chunk_size needs attention in chunks, beside experts that are shared",
    "nemotron_h": _MAMBA,
    "phimoe": "router_jitter_noise needs SparseMixer's router, beside LayerNorm",
}
