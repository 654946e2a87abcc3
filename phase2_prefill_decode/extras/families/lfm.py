"""LFM2: short convolutions in most layers, attention in the others."""

from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_int, check_number
from phase2_prefill_decode.extras.families.stateful import ShortConvLayer
from phase2_prefill_decode.loading.config import LayerConfig
from phase2_prefill_decode.loading.families import Family, fields_of

NAMES = {  # the checkpoint's, and what they are elsewhere
    "operator_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "self_attn.out_proj.": "self_attn.o_proj.",
    "q_layernorm.": "q_norm.",
    "k_layernorm.": "k_norm.",
    "conv.conv.bias": "conv.conv_bias.weight",
    "model.embedding_norm.": "model.norm.",
}


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **config, **family.ignored}
    layers = check_int("num_hidden_layers", config["num_hidden_layers"], 1, 1 << 16)
    attends = config["full_attn_idxs"]
    if attends is not None and not isinstance(attends, list):
        raise ConfigError(f"full_attn_idxs must be a list of numbers of layers, got {attends!r}")
    kinds = config["layer_types"] or [
        "full_attention" if attends is None or number in attends else "conv" for number in range(layers)
    ]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"conv", "full_attention"}:
        raise ConfigError(f"layer_types must be conv or full_attention for each of {layers} layers, got {kinds!r}")
    config |= {
        "layer_types": None,
        "rms_norm_eps": config["norm_eps"],
        "tie_word_embeddings": config["tie_word_embeddings"]
        if config["tie_embedding"] is None
        else config["tie_embedding"],
        "intermediate_size": _intermediate_size(config),
    }
    conv = ShortConvLayer(taps=config["conv_L_cache"], bias=config["conv_bias"])
    described = tuple(conv if kind == "conv" else LayerConfig() for kind in kinds)
    return fields_of(family, config) | {"layers": described}


def _intermediate_size(config: Mapping[str, Any]) -> int:
    """The size of the MLP: a config.json may have it before it is adjusted."""
    size = check_int("intermediate_size", config["block_ff_dim"] or config.get("intermediate_size"), 1, 1 << 24)
    if not check_bool("block_auto_adjust_ff_dim", config["block_auto_adjust_ff_dim"]):
        return size
    size, multiple = int(2 * size / 3), check_int("block_multiple_of", config["block_multiple_of"], 1, 1 << 24)
    if (multiplier := config["block_ffn_dim_multiplier"]) is None:
        return size
    size = int(check_number("block_ffn_dim_multiplier", multiplier, 0, above=True) * size)
    return -(-size // multiple) * multiple


LFM2 = Family(
    absent={
        "num_key_value_heads": 8, "max_position_embeddings": 128_000, "eos_token_id": 2, "tie_word_embeddings": True,
        "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "conv_bias": False, "conv_L_cache": 3, "layer_types": None,
        "full_attn_idxs": None, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_ff_dim": None, "tie_embedding": None,
    },
    ignored={
        "use_sliding_window": False, "max_window_layers": 0, "attention_bias": False, "mlp_bias": False,
        **dict.fromkeys(  # of training, or the same as other fields
            (
                "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
                "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
            )
        ),
    },
    qk_norm=True,
    read=_read,
)  # fmt: skip
