"""Olmo 2 and 3: norms after attention and after the MLP, and over whole rows of q and k. Olmo 3 has windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.loading.config import RopeParameters
from phase2_prefill_decode.loading.families import Family, fields_of, rope_of


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    return fields_of(family, config) | {
        "layers": (FamilyLayer(norms="after", norms_rows=True),) * config["num_hidden_layers"]
    }


def _read_olmo3(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Only layers without a window have a rope that extends the context."""
    config = {**family.absent, **config}
    kinds = (
        "full_attention" if number % 4 == 3 else "sliding_attention" for number in range(config["num_hidden_layers"])
    )
    config["layer_types"] = config["layer_types"] or [*kinds]
    written, local = config.get("rope_parameters"), {"rope_theta": config["rope_theta"]}
    if isinstance(written, Mapping) and isinstance(written.get("full_attention"), Mapping):
        config["rope_parameters"], local = written["full_attention"], written.get("sliding_attention") or local
    known = fields_of(family, config)
    rope = RopeParameters.from_dict(rope_of({"rope_parameters": local}), known["max_position_embeddings"])
    layer = FamilyLayer(norms="after", norms_rows=True)
    windows = known["sliding_windows"]
    return known | {
        "layers": tuple(layer if window is None else replace(layer, window=window, rope=rope) for window in windows)
    }


_NONE: dict[str, Any] = {"num_key_value_heads": None, "eos_token_id": 50_279, "rms_norm_eps": 1e-5}
OLMO2 = Family(
    absent={**_NONE, "max_position_embeddings": 2048},
    ignored={"use_sliding_window": False, "max_window_layers": 0, "layer_types": None, "mlp_bias": False},
    qk_norm=True,
    read=_read,
)
OLMO3 = Family(
    absent={
        **_NONE, "max_position_embeddings": 2048, "sliding_window": 4096,
        "layer_types": None, "rope_theta": 500_000.0,
    },
    ignored={"use_sliding_window": True, "max_window_layers": 0, "mlp_bias": False},
    qk_norm=True,
    read=_read_olmo3,
)  # fmt: skip
