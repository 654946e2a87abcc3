"""Converts a Qwen3 or LFM2 checkpoint in bfloat16 to GGUF, without a tokenizer: to_gguf.py MODEL_DIR OUT.gguf."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TOP = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}  # fmt: skip


def gguf_name(name: str) -> str | None:
    """The name of a tensor in GGUF. None for the output matrix, which is the embedding's."""
    if name == "lm_head.weight":
        return None
    if name in TOP:
        return TOP[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part.removesuffix('.weight')]}.weight"


def main(source: Path, target: str) -> None:
    config = json.loads((source / "config.json").read_text("utf-8"))
    out = gguf.GGUFWriter(target, config["model_type"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    if config["model_type"] == "lfm2":
        out.add_head_count_kv([0 if kind == "conv" else kv_heads for kind in config["layer_types"]])
        out.add_shortconv_l_cache(config["conv_L_cache"])
        out.add_layer_norm_rms_eps(config["norm_eps"])
    else:
        out.add_head_count_kv(kv_heads)
        out.add_key_length(config["head_dim"])
        out.add_value_length(config["head_dim"])
        out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in load_file(source / "model.safetensors").items():
        if (new := gguf_name(name)) is None:
            continue
        if tensor.ndim != 2:  # a norm or a convolution
            out.add_tensor(new, tensor.float().squeeze().numpy())
            continue
        raw = tensor.contiguous().view(torch.int16).numpy().view(np.uint8).reshape(tensor.shape[0], -1)
        out.add_tensor(new, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
