"""Reads the config.json of the four model families into one form. What would be computed wrongly is refused here."""

from collections.abc import Mapping
from typing import Any

from phase2_prefill_decode.fields import MAX_LENGTH, ConfigError, flag, integer

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FAMILIES = tuple(ARCHITECTURES.values())

# The values of absent keys: the defaults of transformers' configuration classes.
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28, "sliding_window": 4096}
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "eos_token_id": 2, "sliding_window": 4096
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}  # fmt: skip
_ALWAYS_THERE = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"

# Keys that change the computation, and the values that are supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "is_causal": (None, True),
    "add_cross_attention": (None, False),
}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig, from the content of a config.json. `rope_parameters` is a dict."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"a model's configuration must be a JSON object, got {type(config).__name__}")
    family = _family(config)
    missing = [name for name in _ALWAYS_THERE if config.get(name) is None]
    if missing:
        raise ConfigError(f"the model's configuration lacks {', '.join(missing)}")
    _refuse_others(config)
    config = {**_ABSENT[family], **config}
    layers = integer("num_hidden_layers", config["num_hidden_layers"], 1, 1 << 16)
    integer("max_position_embeddings", config["max_position_embeddings"], 1, MAX_LENGTH)
    return {
        "model_type": family,
        **{name: config[name] for name in _ALWAYS_THERE},
        "num_key_value_heads": config["num_key_value_heads"] or 0,
        "head_dim": config.get("head_dim") or 0,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_parameters": _rope(config),
        "max_position_embeddings": config["max_position_embeddings"],
        **_biases(config, family),
        "qk_norm": family == "qwen3",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "sliding_windows": _windows(config, family, layers),
        "eos_token_id": eos_ids(config),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def _family(config: Mapping[str, Any]) -> str:
    """From model_type or architectures. If both are given, they must agree."""
    named = config.get("architectures") or []
    named = [str(name) for name in (named if isinstance(named, list) else [named])]
    kind = config.get("model_type") or (ARCHITECTURES.get(named[0]) if len(named) == 1 else None)
    if kind not in FAMILIES or (named and [ARCHITECTURES.get(name) for name in named] != [kind]):
        raise ConfigError(
            f"this model is {', '.join(named) or 'of no named architecture'} (model_type "
            f"{config.get('model_type')!r}); supported are {', '.join(ARCHITECTURES)} "
            f"(model_type {', '.join(FAMILIES)})"
        )
    return str(kind)


def _refuse_others(config: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY.items():
        if config.get(name) not in allowed:
            known = " or ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ConfigError(f"{name} is {config[name]!r}; supported is {known}")


def _biases(config: Mapping[str, Any], family: str) -> dict[str, bool]:
    if family == "qwen2":
        return {"qkv_bias": True, "out_bias": False, "mlp_bias": False}
    if family == "mistral":
        return {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
    attention = flag("attention_bias", config.get("attention_bias", False))
    mlp = flag("mlp_bias", config.get("mlp_bias", False)) if family == "llama" else False
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or the earlier form: `rope_scaling` with `rope_theta` beside it."""
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(written, Mapping) or any(isinstance(value, Mapping) for value in written.values()):
        raise ConfigError(f"rope must be one set of parameters for all layers, got {written!r}")
    if written.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor is {written['partial_rotary_factor']!r}; supported is 1")
    written = {"rope_theta": config.get("rope_theta"), **written}
    original = config.get("original_max_position_embeddings")
    if original is not None:  # at the top level it takes precedence, as in transformers
        written["original_max_position_embeddings"] = original
    return written


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Mistral has one in all layers; Qwen, with use_sliding_window, in some."""
    window, first = config.get("sliding_window"), 0
    if family == "llama":
        window = None
    elif family != "mistral":
        used = flag("use_sliding_window", config.get("use_sliding_window", False))
        window = window if used else None
        first = integer("max_window_layers", config["max_window_layers"], 0, MAX_LENGTH)
    windows = tuple(None if number < first else window for number in range(layers))
    types = config.get("layer_types")
    if types is None:
        return windows
    meaning = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if not isinstance(types, list) or len(types) != layers or not all(str(kind) in meaning for kind in types):
        raise ConfigError(f"layer_types must be {' or '.join(meaning)} for each of {layers} layers, got {types!r}")
    said = tuple(meaning[kind] for kind in types)
    if family in ("llama", "mistral") and said != windows:
        raise ConfigError(f"layer_types of a {family} model must say what its sliding_window says, got {types!r}")
    return said


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens: one, several or none."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(integer("eos_token_id", token, 0, (1 << 31) - 1) for token in ids))
