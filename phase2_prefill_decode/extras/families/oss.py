"""gpt-oss: sinks in attention, every other layer with a window, and experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phase0_request.support.checks import check_int
from phase2_prefill_decode.extras.families.layer import Experts, FamilyLayer
from phase2_prefill_decode.loading.families import Family, fields_of

ALTERNATING = "sliding_attention", "full_attention"


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **{name: value for name, value in config.items() if value is not None}}
    layers = check_int("num_hidden_layers", config.get("num_hidden_layers"), 1, 1 << 16)
    known = fields_of(family, {"layer_types": [ALTERNATING[number % 2] for number in range(layers)], **config})
    layer = FamilyLayer(
        sinks=True,
        clamped=(config["swiglu_alpha"], config["swiglu_limit"]),
        experts=Experts(
            number=config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
            inner=known["intermediate_size"],
            norm_topk=True,  # a softmax over the chosen
            bias=True,
        ),
    )
    return known | {"layers": tuple(replace(layer, window=window) for window in known["sliding_windows"])}


GPT_OSS = Family(
    absent={
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "sliding_window": 128,
        "attention_bias": True, "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    ignored={
        "use_sliding_window": True, "max_window_layers": 0, "mlp_bias": False, "moe_intermediate_size": None,
        "norm_topk_prob": True, "experts_per_token": None, "initial_context_length": None,
    },
    read=_read,
)  # fmt: skip
