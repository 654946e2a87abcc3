"""Split: the configuration of a rank. It is checked before torch is imported."""

from dataclasses import replace
from typing import Any

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.extras.families.stateful import check_stateless
from phase2_prefill_decode.loading.config import ModelConfig


def split(config: ModelConfig, ranks: int) -> ModelConfig:
    """The configuration of each rank's part, with tensor parallel: its heads, with their keys and values, and its
    part of the MLP. Everything else is as in the whole model."""
    check_stateless(config, "tensor_parallel_size")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    divided = {"num_attention_heads": heads, "intermediate_size": config.intermediate_size}
    for name, size in divided.items():
        if size % ranks:
            raise ConfigError(f"tensor_parallel_size must divide the model's {name}, {size}; got {ranks}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size must divide the model's num_key_value_heads, {kv_heads}, or be a multiple of "
            f"it; got {ranks}"
        )
    own: dict[str, Any] = {name: size // ranks for name, size in divided.items()}
    layers = tuple(layer.part(ranks) if isinstance(layer, FamilyLayer) else layer for layer in config.layers)
    return replace(config, **own, num_key_value_heads=max(kv_heads // ranks, 1), layers=layers)
