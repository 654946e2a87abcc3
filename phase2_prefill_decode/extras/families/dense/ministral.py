"""Ministral 3: Llama whose queries grow with their position, as in Llama 4, once it is beyond the original context."""

from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import check_int, check_number
from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.loading.families import MAX_LENGTH, Family, fields_of

ABSENT = {  # without rope_parameters
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": ABSENT}
    known = fields_of(family, config)
    rope, growth = known["rope_parameters"], None
    if rope.get("llama_4_scaling_beta") is not None:
        original = rope.get("original_max_position_embeddings") or known["max_position_embeddings"]
        check_int("original_max_position_embeddings", original, 1, MAX_LENGTH)
        growth = check_number("llama_4_scaling_beta", rope["llama_4_scaling_beta"], 0), original
    layers = tuple(FamilyLayer(window=window, query_growth=growth) for window in known["sliding_windows"])
    return known | {"layers": layers}


MINISTRAL3 = Family(
    absent={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
        "eos_token_id": 2, "sliding_window": None,
    },
    ignored={
        "use_sliding_window": True, "max_window_layers": 0, "layer_types": None, "attention_bias": False,
        "mlp_bias": False,
    },
    read=_read,
)  # fmt: skip
