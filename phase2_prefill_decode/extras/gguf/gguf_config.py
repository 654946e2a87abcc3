"""The metadata of a GGUF file as a config.json."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phase0_request.extras.gguf_file import GGUFHeader, read_header
from phase0_request.support.checks import ConfigError, check_choice, check_number
from phase2_prefill_decode.extras.gguf.architectures import ARCHITECTURES, ModelMetadata

MIXTRAL = "mixtral"  # is llama with experts; Mistral's other models are llama
ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # of LongRoPE
SOFTMAX = 1  # as llama.cpp numbers what a router makes of its scores
NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "scale_linear": 1.0}  # rope is computed without these
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


def read_config(file: Path) -> dict[str, Any]:
    return config_of(read_header(file))


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """What the config.json of this model would say."""
    tensors, kind = header.tensors, str(header.metadata.get("general.architecture"))
    check_choice(f"{header.file}: general.architecture", kind, ARCHITECTURES)
    architecture, metadata = ARCHITECTURES[kind], ModelMetadata(header, kind)
    get, count = metadata.get, metadata.count

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{header.file} must hold a matrix token_embd.weight")
    heads, size, context = count("attention.head_count"), count("embedding_length"), count("context_length")
    head_dim = count("attention.key_length", size // heads)
    rotated = count("rope.dimension_count", head_dim)
    unlike = {"attention.value_length": head_dim, "expert_shared_count": 0, "expert_gating_func": SOFTMAX}
    unlike |= {"expert_weights_scale": 1} | ({} if architecture.partial else {"rope.dimension_count": head_dim})
    for name, only in unlike.items():
        if get(name, only) != only:
            raise ConfigError(f"{header.file}: {kind}.{name} is {get(name)}; supported is {only}")
    window = count("attention.sliding_window", 0, 0)
    if 0 < window < context and not architecture.windows:
        raise ConfigError(f"{header.file}: {kind}.attention.sliding_window is not supported")
    kv_heads = {*metadata.each("attention.head_count_kv", heads)} - {0}  # 0: a layer without attention
    if len(kv_heads) != 1:
        raise ConfigError(f"{header.file}: {kind}.attention.head_count_kv must be one number, got {sorted(kv_heads)}")
    rope = _rope(header, kind, rotated) | {"partial_rotary_factor": rotated / head_dim}
    experts = _experts(kind, get) if get("expert_count", 0) else {"model_type": architecture.model_type}
    return experts | {
        "vocab_size": embedding.shape[0],
        "hidden_size": size,
        "intermediate_size": get("feed_forward_length", get("expert_feed_forward_length", 0) or None),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads.pop(),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "sliding_window": window if 0 < window < context else None,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(header.eos_ids),
        "dtype": _dtype(header),
        **architecture.own(metadata, rope),
    }


def _experts(kind: str, get: Callable[..., Any]) -> dict[str, Any]:
    """What llama.cpp's file says of experts; whether probabilities are normed follows from the architecture there."""
    return {
        "model_type": MIXTRAL if kind == "llama" else ARCHITECTURES[kind].model_type,
        "num_experts" if kind.startswith("qwen") else "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length", get("feed_forward_length", 0) or None),
        "norm_topk_prob": kind in ("qwen3moe", "qwen35moe"),
    }


def _rope(header: GGUFHeader, kind: str, head_dim: int) -> dict[str, Any]:
    """Of a model that rotates the first `head_dim` numbers of a head."""
    prefix = f"{kind}.rope.scaling"
    theta = header.get(f"{kind}.rope.freq_base", (int, float), 10_000.0)
    rope: dict[str, Any] = {"rope_theta": check_number(f"{header.file}: {kind}.rope.freq_base", theta, 0, above=True)}
    if LONG in header.tensors and SHORT in header.tensors:
        by_pair = {key: list(_floats(header, name, head_dim // 2)) for key, name in FACTORS.items()}
        original = header.get(f"{prefix}.original_context_length", int)
        scale = header.get(f"{prefix}.attn_factor", (int, float), 1.0)
        return rope | by_pair | {
            "rope_type": "longrope", "attention_factor": scale, "original_max_position_embeddings": original
        }  # fmt: skip
    for name, neutral in NEUTRAL.items():
        for key in (f"{prefix}.{name}", f"{kind}.rope.{name}"):
            if header.metadata.get(key, neutral) != neutral:
                raise ConfigError(f"{header.file}: {key} is {header.metadata[key]!r}; supported is {neutral}")
    scaling = header.metadata.get(f"{prefix}.type", "none")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": header.metadata.get(f"{prefix}.factor")}
        rope["original_max_position_embeddings"] = header.metadata.get(f"{prefix}.original_context_length")
    if scaling == "yarn":
        further = {name: header.metadata.get(f"{prefix}.{key}") for key, name in YARN.items()}
        rope |= {name: value for name, value in further.items() if value is not None}
        if scales := header.metadata.get(f"{prefix}.yarn_log_multiplier"):  # llama.cpp knows of the second
            rope |= {"mscale": 1.0, "mscale_all_dim": scales}
    if ROPE_FACTORS not in header.tensors:
        return rope
    # Llama 3 has a factor for each pair, computed from one. The other constants are those of all its versions.
    factors = _floats(header, ROPE_FACTORS, head_dim // 2)
    llama3 = {
        "rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    for pair, factor in enumerate(factors):
        turns = 8192 / (2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim))
        kept = min(max((turns - 1) / 3, 0), 1)
        if not math.isclose(factor, 1 / (kept + (1 - kept) / max(factors)), rel_tol=1e-4):
            raise ConfigError(f"{header.file}: {ROPE_FACTORS} is not that of Llama 3, and no other is supported")
    return rope | llama3


FACTORS = {"long_factor": LONG, "short_factor": SHORT}


def _floats(header: GGUFHeader, name: str, count: int) -> tuple[float, ...]:
    tensor = header.tensors[name]
    with header.file.open("rb") as source:
        source.seek(tensor.start)
        content = source.read(4 * count)
    if tensor.kind != 0 or tensor.shape != (count,) or len(content) < 4 * count:
        raise ConfigError(f"{header.file} must hold {count} numbers in float32 as {name}")
    return tuple(
        check_number(f"{header.file}: {name}", number, 0, above=True) for number in struct.unpack(f"<{count}f", content)
    )


# These are float32 in all files.
SMALL = "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "conv.weight", "conv1d.weight"


def _dtype(header: GGUFHeader) -> str:
    """The dtype to compute in: the dtype of the matrices, if all have the same."""
    matrices = {name: tensor for name, tensor in header.tensors.items() if len(tensor.shape) > 1}
    kinds = {tensor.kind for name, tensor in matrices.items() if not name.endswith(SMALL)}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")
