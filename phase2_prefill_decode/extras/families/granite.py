"""Granite: Llama with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phase0_request.support.checks import check_number
from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.loading.families import Family, fields_of


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    known = fields_of(family, config)
    config = {**family.absent, **config}
    layer = FamilyLayer(
        scale=config["attention_multiplier"],
        residual_multiplier=config["residual_multiplier"],
    )
    first = replace(layer, input_multiplier=config["embedding_multiplier"])
    return known | {
        "layers": (first, *[layer] * (config["num_hidden_layers"] - 1)),
        "logits_multiplier": 1 / check_number("logits_scaling", config["logits_scaling"], 0, above=True),
    }


GRANITE = Family(
    absent={
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
        "num_key_value_heads": None, "max_position_embeddings": 2048, "eos_token_id": 2,
    },
    ignored={"use_sliding_window": False, "max_window_layers": 0, "layer_types": None},
    read=_read,
)  # fmt: skip
