"""Families with experts in place of MLPs: Qwen2-MoE, Qwen3-MoE, OLMoE and Mixtral."""

from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_int
from phase2_prefill_decode.extras.families.layer import SHARED_SIZE, Experts, FamilyLayer
from phase2_prefill_decode.loading.families import Family, fields_of


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **config, **family.ignored}
    if config["model_type"] == "qwen2_moe" and config.get("use_sliding_window") and config["layer_types"] is None:
        kinds, count = ("full_attention", "sliding_attention"), config["num_hidden_layers"]
        config["layer_types"] = [kinds[number % 2 == 0 and number < config[LAST]] for number in range(count)]
    known = fields_of(family, config)
    numbers = [config[name] for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    if any(number != numbers[0] for number in numbers):
        raise ConfigError(f"num_experts and num_local_experts are two names of one number, got {numbers}")
    experts = Experts(
        number=numbers.pop() if numbers else family.absent[EXPERTS],
        top_k=config["num_experts_per_tok"],
        inner=config.get("moe_intermediate_size") or config["intermediate_size"],
        norm_topk=config["norm_topk_prob"],
        shared=config.get(SHARED_SIZE) or 0,
    )
    every, dense = check_int("decoder_sparse_step", config["decoder_sparse_step"], 1), config["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise ConfigError(f"mlp_only_layers must be a list of numbers of layers, got {dense!r}")
    return known | {
        "qkv_bias": check_bool("qkv_bias", config.get("qkv_bias", known["qkv_bias"])),
        "layers": tuple(
            FamilyLayer(
                window=window,
                norms_rows=config["model_type"] == "olmoe",
                experts=None if number in dense or (number + 1) % every else experts,
            )
            for number, window in enumerate(known["sliding_windows"])
        ),
    }


EXPERTS = "default number of experts"  # a key that no file has: the number has one of two names there
LAST = "max_window_layers"
_NUMBER: dict[str, Any] = {EXPERTS: 8, "num_experts": None, "num_local_experts": None}
_ALL = {"decoder_sparse_step": 1, "mlp_only_layers": None}
QWEN3_MOE = Family(
    absent={
        "num_key_value_heads": 4, "max_position_embeddings": 32_768, "sliding_window": 4096, **_ALL, **_NUMBER,
        EXPERTS: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    ignored={"mlp_bias": False, "max_window_layers": 0, "layer_types": None},
    qk_norm=True,
    only={"use_qk_norm": (None, True), SHARED_SIZE: (None, 0)},
    read=_read,
)  # fmt: skip
QWEN2_MOE = Family(
    absent={
        "num_key_value_heads": 16, "max_position_embeddings": 32_768, "sliding_window": 4096, "layer_types": None,
        LAST: 28, **_ALL, **_NUMBER, EXPERTS: 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "norm_topk_prob": False, SHARED_SIZE: 5632, "qkv_bias": True,
    },
    ignored={"attention_bias": False, "mlp_bias": False},
    read=_read,
)  # fmt: skip
OLMOE = Family(
    absent={
        "num_key_value_heads": None, "max_position_embeddings": 4096, "eos_token_id": 50_279, "rms_norm_eps": 1e-5,
        **_NUMBER, EXPERTS: 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    ignored={
        "use_sliding_window": False, "max_window_layers": 0, "layer_types": None, "mlp_bias": False,
        "moe_intermediate_size": None, **_ALL,
    },
    qk_norm=True,
    only={"clip_qkv": (None,)},
    read=_read,
)  # fmt: skip
MIXTRAL = Family(
    absent={
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "eos_token_id": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0, "sliding_window": None, **_NUMBER, "num_experts_per_tok": 2,
    },
    ignored={
        "use_sliding_window": True, "max_window_layers": 0, "layer_types": None, "attention_bias": False,
        "mlp_bias": False, "moe_intermediate_size": None, "norm_topk_prob": True, **_ALL,
    },
    read=_read,
)  # fmt: skip
