"""SmolLM3: Llama with layers that do not rotate queries and keys (NoPE), one in four."""

from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError, check_int
from phase2_prefill_decode.loading.config import LayerConfig, RopeParameters
from phase2_prefill_decode.loading.families import Family, fields_of, windows_of

NOT_ROTATED = RopeParameters(partial_rotary_factor=0)


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, "use_sliding_window": False, **config, **family.ignored}
    layers, rotates = config["num_hidden_layers"], config["no_rope_layers"]  # which holds a 1 where a layer has rope
    every = check_int("no_rope_layer_interval", config["no_rope_layer_interval"], 1)
    if rotates is None:
        rotates = [int((number + 1) % every != 0) for number in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers or not all(number in (0, 1) for number in rotates):
        raise ConfigError(f"no_rope_layers must be 0 or 1 for each of {layers} layers, got {rotates!r}")
    windowed = config["use_sliding_window"] and config["sliding_window"] is not None
    kinds = config["layer_types"] or [
        "sliding_attention" if windowed and not rope else "full_attention" for rope in rotates[:layers]
    ]
    windows = windows_of({**config, "layer_types": kinds})
    return fields_of(family, {**config, "layer_types": kinds}) | {
        "layers": tuple(
            LayerConfig(window=window, rope=None if rope else NOT_ROTATED)
            for window, rope in zip(windows, rotates, strict=False)
        )
    }


SMOLLM3 = Family(
    absent={
        "num_key_value_heads": 4, "max_position_embeddings": 32_768, "eos_token_id": 128_001, "sliding_window": None,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    ignored={"max_window_layers": 0},
    read=_read,
)  # fmt: skip
