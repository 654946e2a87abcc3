"""Olmo 2: norms after attention and after the MLP, and over whole rows of q and k."""

from collections.abc import Mapping
from typing import Any

from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.loading.families import Family, fields_of


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    return fields_of(family, config) | {
        "layers": (FamilyLayer(norms="after", norms_rows=True),) * config["num_hidden_layers"]
    }


OLMO2 = Family(
    absent={
        "num_key_value_heads": None, "max_position_embeddings": 2048, "eos_token_id": 50_279, "rms_norm_eps": 1e-5
    },
    ignored={"use_sliding_window": False, "max_window_layers": 0, "layer_types": None, "mlp_bias": False},
    qk_norm=True,
    read=_read,
)  # fmt: skip
