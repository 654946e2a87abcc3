"""Qwen 3.5 and Qwen3-Next: Gated DeltaNet in three layers of four, attention with a gate in the fourth."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phase0_request.support.checks import ConfigError, check_int
from phase2_prefill_decode.extras.families.layer import Experts
from phase2_prefill_decode.extras.families.stateful import HEAD_NORM, DeltaLayer, GatedLayer
from phase2_prefill_decode.loading.config import LayerConfig
from phase2_prefill_decode.loading.families import Family, fields_of

NAMES = {  # the checkpoint's, and what they are elsewhere
    "linear_attn.norm.": f"linear_attn.{HEAD_NORM}.",
    "linear_attn.A_log": "linear_attn.A_log.weight",
    "linear_attn.dt_bias": "linear_attn.dt_bias.weight",
}
KINDS = "linear_attention", "full_attention"
TILED = "order of value heads"  # a key of GGUF alone: in a config.json, the value heads of one key head are neighbours


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **config, **family.ignored}
    layers = check_int("num_hidden_layers", config["num_hidden_layers"], 1, 1 << 16)
    every = check_int("full_attention_interval", config["full_attention_interval"], 1)
    kinds = config["layer_types"] or [KINDS[(number + 1) % every == 0] for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {*KINDS}:
        raise ConfigError(f"layer_types must be {' or '.join(KINDS)} for each of {layers} layers, got {kinds!r}")
    experts = None
    if family.absent.get("num_experts"):
        norm = config.get("norm_topk_prob")
        experts = Experts(
            number=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            inner=config["moe_intermediate_size"],
            norm_topk=True if norm is None else norm,
            shared=config["shared_expert_intermediate_size"],
        )
        config["intermediate_size"] = experts.inner  # no layer has a dense MLP
    delta = DeltaLayer(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        experts=experts,
        tiled=config[TILED],
    )
    rope, share = config.get("rope_parameters"), config["partial_rotary_factor"]
    share = rope.get("partial_rotary_factor", share) if isinstance(rope, Mapping) and rope else share
    config |= {"layer_types": None, "partial_rotary_factor": share}
    described: dict[str, LayerConfig] = {KINDS[0]: delta, KINDS[1]: GatedLayer(experts=experts)}
    return fields_of(family, config) | {"layers": tuple(described[kind] for kind in kinds)}


QWEN3_5 = Family(
    absent={
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768, "layer_types": None,
        "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "rope_theta": 10_000.0, TILED: False,
    },
    ignored={
        "use_sliding_window": False, "max_window_layers": 0, "mlp_bias": False, "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
    },
    qk_norm=True,
    only={
        "hidden_act": (None, "silu"), "attn_output_gate": (None, True), "mamba_ssm_dtype": (None, "float32"),
        "mlp_only_layers": (None, []), "output_gate_type": (None, "swish"),
    },
    partial_rotary=True,
    read=_read,
)  # fmt: skip
QWEN3_5_MOE = replace(
    QWEN3_5,
    absent={
        **QWEN3_5.absent, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    only={**QWEN3_5.only, "norm_topk_prob": (None, True), "decoder_sparse_step": (None, 1)},
)  # fmt: skip
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    absent={**QWEN3_5_MOE.absent, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    only={name: values for name, values in QWEN3_5_MOE.only.items() if name != "norm_topk_prob"},
)
