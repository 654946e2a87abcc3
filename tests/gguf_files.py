"""GGUF files, written by llama.cpp's own package. It is imported where it is used. Types are given by their names."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from phase0_request.tokenizer import BUNDLED
from phase6_integration.lab.peers.to_gguf import LAYER

if TYPE_CHECKING:
    import gguf

NORMAL, CONTROL = 1, 3  # types of tokens
FURTHER = {
    "mlp.gate": "ffn_gate_inp", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "post_feedforward_layernorm": "post_ffw_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up", "operator_norm": "attn_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "ffn_norm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
TURNED = "llama", "granite", "smollm3", "mistral3"  # converters that are subclasses of llama.cpp's LlamaModel
AFTER = "olmo2", "olmo3"  # their norms are after attention and after the MLP
FROM_ZERO = "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text"  # their norms multiply by one plus the weight
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "ministral3": "mistral3",
    "olmo3": "olmo2", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen2_moe": "qwen2moe",
    "gemma3_text": "gemma3",
}  # fmt: skip
TOP = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
}  # fmt: skip
KindOf = Callable[[str], str]  # of the matrix with a name


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{suffix}"
    _, _, number, part = module.split(".", 3)
    if suffix in ("A_log", "dt_bias"):
        return f"blk.{number}.ssm_a" if suffix == "A_log" else f"blk.{number}.ssm_dt.bias"
    return f"blk.{number}.{(LAYER | FURTHER)[part]}.{suffix}"


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, str, Tensor]]:
    """The tensors of a model as llama.cpp has them: their names here and there, and parts of the parameters."""
    if model.config.model_type == "gpt_oss":
        yield from _tensors_of_oss(model)
        return
    for name, weight in model.named_parameters():
        layer, found, kind = name.partition(".mlp.experts.")
        place = f"blk.{layer.rpartition('.')[2]}"
        if not found:
            theirs = gguf_name(name)
            if name.endswith("post_attention_layernorm.weight") and model.config.model_type in (*AFTER, *FROM_ZERO):
                theirs = theirs.replace("ffn_norm", "post_attention_norm")
            yield name, theirs, weight
        elif kind == "gate_up_proj":
            gate, up = weight.chunk(2, 1)
            yield name, f"{place}.ffn_gate_exps.weight", gate
            yield name, f"{place}.ffn_up_exps.weight", up
        else:
            yield name, f"{place}.ffn_down_exps.weight", weight


def _tensors_of_oss(model: PreTrainedModel) -> Iterator[tuple[str, str, Tensor]]:
    """The same of gpt-oss, whose experts have gate and up alternating, and matrices that are transposed."""
    for name, weight in model.named_parameters():
        layer, found, kind = name.partition(".mlp.experts.")
        place, suffix = f"blk.{layer.rpartition('.')[2]}", "bias" if kind.endswith("_bias") else "weight"
        if name.endswith(".sinks"):
            yield name, f"blk.{name.split('.')[2]}.attn_sinks.weight", weight
        elif not found:
            named = gguf_name(name.replace(".mlp.router.", ".mlp.gate."))
            yield name, named.replace("ffn_norm", "post_attention_norm"), weight
        else:
            rows = weight if suffix == "bias" else weight.transpose(1, 2)
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if kind.startswith("gate_up") else {"down": rows}
            for part, own in parts.items():
                yield name, f"{place}.ffn_{part}_exps.{suffix}", own


def writer(file: Path, config: Any, tokenizer: bool = False) -> "gguf.GGUFWriter":
    """A file with the metadata of a model."""
    import gguf

    out = gguf.GGUFWriter(str(file), ARCHITECTURES.get(config.model_type, config.model_type))
    if hasattr(config, "num_experts_per_tok"):
        out.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        out.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        out.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        rope = config.rope_parameters
        out.add_sliding_window(config.sliding_window)
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(rope["factor"])
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "granite":
        out.add_attention_scale(config.attention_multiplier)
        out.add_embedding_scale(config.embedding_multiplier)
        out.add_residual_scale(config.residual_multiplier)
        out.add_logit_scale(config.logits_scaling)
    if config.model_type == "phi3":
        _add_phi(out, config)
    if hasattr(config, "shared_expert_intermediate_size"):
        out.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        _add_qwen35(out, config)
    if config.model_type == "lfm2":
        out.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type in ("olmo3", "gemma3_text"):
        out.add_sliding_window(config.sliding_window)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    if config.model_type == "olmo3":
        out.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "gemma3_text":
        out.add_uint32("gemma3.attention.sliding_window_pattern", config._sliding_window_pattern)
        out.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") == "linear" and config.model_type == "gemma3_text":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn" and config.model_type != "gpt_oss":
        _add_yarn(out, rope)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    if config.model_type != "qwen3_5_moe_text":  # all its layers have experts
        out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or () if config.model_type == "lfm2" else ()
    out.add_head_count_kv([0 if kind == "conv" else kv_heads for kind in kinds] or kv_heads)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        out.add_key_length(head_dim)
        out.add_value_length(head_dim)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    out.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    out.add_layer_norm_rms_eps(config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps)
    out.add_rope_freq_base(rope["rope_theta"])
    if tokenizer:
        add_tokenizer(out)
    else:
        out.add_tokenizer_model("none")
    return out


def _add_phi(out: "gguf.GGUFWriter", config: Any) -> None:
    """LongRoPE's factors are tensors. A window of 0 stands for none."""
    original, rope = config.original_max_position_embeddings, config.rope_parameters
    out.add_rope_scaling_orig_ctx_len(original)
    out.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        more = math.log(config.max_position_embeddings / original) / math.log(original)
        out.add_rope_scaling_attn_factors(math.sqrt(1 + more))
        for kind in ("long", "short"):
            out.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_yarn(out: "gguf.GGUFWriter", rope: dict[str, Any]) -> None:
    import gguf

    out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    out.add_rope_scaling_factor(rope["factor"])
    out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    optional = {
        "attention_factor": out.add_rope_scaling_yarn_attn_factor,
        "beta_fast": out.add_rope_scaling_yarn_beta_fast,
        "beta_slow": out.add_rope_scaling_yarn_beta_slow,
        "mscale_all_dim": out.add_rope_scaling_yarn_log_mul,
        "llama_4_scaling_beta": out.add_attn_temperature_scale,
    }
    for name, add in optional.items():
        if rope.get(name) is not None:
            add(rope[name])


def _add_qwen35(out: "gguf.GGUFWriter", config: Any) -> None:
    out.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    out.add_ssm_state_size(config.linear_key_head_dim)
    out.add_ssm_group_count(config.linear_num_key_heads)
    out.add_ssm_time_step_rank(config.linear_num_value_heads)
    out.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    out.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    sections = config.rope_parameters["mrope_section"]
    out.add_rope_dimension_sections([*sections, 0])


def add_tokenizer(out: "gguf.GGUFWriter", pre: str = "qwen2") -> None:
    """The bundled model's vocabulary and chat template."""
    described = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    special = {token["content"] for token in described["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_merges([" ".join(pair) for pair in merges])
    out.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    out.add_eos_token_id(vocabulary["<|im_end|>"])
    out.add_eot_token_id(vocabulary["<|endoftext|>"])
    out.add_chat_template((BUNDLED / "chat_template.jinja").read_text())


def close(out: "gguf.GGUFWriter") -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def rows_for_llama(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k: halves of a head become neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def tiled(weight: Tensor, dim: int, key_heads: int, value_heads: int) -> Tensor:
    """llama.cpp's order of value heads: those of one key head are neighbours in a checkpoint, and as far apart as there
    are key heads in a file."""
    if key_heads == value_heads:
        return weight
    return (
        weight.unflatten(dim, (key_heads, value_heads // key_heads, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    )


def converted(config: Any, name: str, weight: Tensor, back: bool = False) -> Tensor:
    """A tensor as llama.cpp's converter changes it; `back`: the opposite."""
    if config.model_type in FROM_ZERO and name.endswith("norm.weight") and "linear_attn" not in name:
        return weight - 1 if back else weight + 1
    if name.endswith("shared_expert_gate.weight"):
        return weight.unsqueeze(0) if back else weight.squeeze(0)
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        weight = weight.unsqueeze(1) if back else weight.squeeze(1)
    if "linear_attn." in name:
        return _converted_delta(config, name, weight, back)
    if ARCHITECTURES.get(config.model_type, config.model_type) in TURNED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        if back:
            return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return rows_for_llama(weight, heads)
    return weight


def _converted_delta(config: Any, name: str, weight: Tensor, back: bool) -> Tensor:
    """Of Gated DeltaNet: the order of value heads, and the decay in place of its logarithm."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = (heads[1] // heads[0], heads[1]) if back else heads
    keys = 2 * heads[0] * config.linear_key_head_dim
    if ".norm." in name:
        return weight
    if name.endswith("A_log"):
        weight = weight.neg().log() if back else -weight.exp()
    if ".out_proj." in name:
        return tiled(weight, 1, *order)
    if ".in_proj_qkv." in name or ".conv1d." in name:
        return torch.cat((weight[:keys], tiled(weight[keys:], 0, *order)))
    return tiled(weight, 0, *order)


def saved_gguf(model: PreTrainedModel, file: Path, kind_of: KindOf, tokenizer: bool = False) -> PreTrainedModel:
    """Save a model. Its weights become those that the package reads back."""
    config = model.config
    out = writer(file, config, tokenizer)
    with torch.no_grad():
        for name, theirs, weight in tensors_of(model):
            rows = converted(config, name, weight).float()
            plain = rows.ndim == 1 or name.endswith("_bias") or any(part in theirs for part in PLAIN)
            kind = "F32" if plain else kind_of(name)
            blocks = encoded(rows.flatten(0, -2).numpy() if rows.ndim > 1 else rows.numpy(), kind)
            out.add_tensor(theirs, blocks.reshape(*rows.shape[:-1], -1), raw_dtype=number(kind))
            weight.copy_(converted(config, name, dequantized(blocks, kind).reshape(rows.shape), back=True))
    close(out)
    return model


PLAIN = "ffn_gate_inp.", "shortconv.conv.", "ssm_conv1d."  # which the converter keeps in float32


def number(kind: str) -> "gguf.GGMLQuantizationType":
    import gguf

    return gguf.GGMLQuantizationType[kind]


def dequantized(blocks: "np.ndarray[Any, Any]", kind: str) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(blocks, number(kind)).copy())


def encoded(content: "np.ndarray[Any, Any]", kind: str) -> "np.ndarray[Any, Any]":
    """Blocks of a matrix; of the types that the package cannot write, blocks of random numbers."""
    import gguf

    if kind not in RANDOM:
        return np.asarray(gguf.quants.quantize(content, number(kind)))
    out, inputs = content.shape
    numbers, size = gguf.GGML_QUANT_SIZES[number(kind)]
    draw = np.random.default_rng(out + inputs)
    blocks = draw.integers(0, 256, (out, inputs // numbers, size), np.uint8)
    for start in RANDOM[kind]:
        scales = (draw.random(blocks.shape[:2]) * 1e-3).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(out, -1)


RANDOM = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where the scales of a block are
