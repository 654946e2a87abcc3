"""Gemma 3: norms around attention and MLP, two kinds of layers with a rope each, GELU, embeddings that are scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phase0_request.support.checks import check_int, check_number
from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.loading.config import RopeParameters
from phase2_prefill_decode.loading.families import Family, fields_of, rope_of


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **config, **family.ignored}
    layers = check_int("num_hidden_layers", config["num_hidden_layers"], 1, 1 << 16)
    every = check_int("sliding_window_pattern", config["sliding_window_pattern"], 1)
    kinds = config["layer_types"] or [
        "sliding_attention" if number % every else "full_attention" for number in range(1, layers + 1)
    ]
    config["layer_types"] = kinds
    written, local = config.get("rope_parameters"), {"rope_theta": config["rope_local_base_freq"]}
    if isinstance(written, Mapping) and isinstance(written.get("full_attention"), Mapping):
        config["rope_parameters"], local = written["full_attention"], written.get("sliding_attention") or local
    known = fields_of(family, config)
    rope = RopeParameters.from_dict(rope_of({"rope_parameters": local}), known["max_position_embeddings"])
    # region exercise 10.1
    layer = FamilyLayer(
        norms="around",
        activation="gelu_pytorch_tanh",
        scale=check_number("query_pre_attn_scalar", config["query_pre_attn_scalar"], 0, above=True) ** -0.5,
    )
    described = [
        layer if window is None else replace(layer, window=window, rope=rope) for window in known["sliding_windows"]
    ]
    described[0] = replace(described[0], input_multiplier=known["hidden_size"] ** 0.5)
    return known | {"layers": tuple(described)}
    # endregion


GEMMA3 = Family(
    absent={
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "eos_token_id": 1,
        "sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None, "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
    },
    ignored={"use_sliding_window": True, "max_window_layers": 0, "mlp_bias": False},
    qk_norm=True,
    only={
        "hidden_act": (None, "gelu_pytorch_tanh"), "hidden_activation": (None, "gelu_pytorch_tanh"),
        "final_logit_softcapping": (None,), "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    },
    read=_read,
)  # fmt: skip
