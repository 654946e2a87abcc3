"""Reads a config.json into the fields of ModelConfig, or refuses it. Families, and how they differ, are data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int
from phase0_request.support.model_files import eos_ids_in

MAX_LENGTH = 1 << 24  # tokens; longer than any context in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of a model type, under the keys of a config.json."""

    absent: Mapping[str, Any]  # values of keys that the file does not have: the defaults of transformers
    ignored: Mapping[str, Any]  # values of keys that count for nothing here, whatever the file says
    qkv_bias: bool = False  # biases of q, k and v also without attention_bias
    qk_norm: bool = False
    partial_rotary: bool = False  # whether partial_rotary_factor is supported
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # supported values, if they are not the usual
    read: "Callable[[Family, Mapping[str, Any]], dict[str, Any]] | None" = None  # None: `fields_of`


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28, "sliding_window": 4096}
FAMILIES: dict[str, Family] = {
    "llama": Family(
        absent={"num_key_value_heads": None, "max_position_embeddings": 2048, "eos_token_id": 2},
        ignored={"use_sliding_window": False, "max_window_layers": 0, "layer_types": None},
    ),
    "mistral": Family(
        absent={
            "num_key_value_heads": 8, "max_position_embeddings": 131_072, "eos_token_id": 2, "sliding_window": 4096
        },
        ignored={
            "use_sliding_window": True, "max_window_layers": 0, "layer_types": None, "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "qwen2": Family(
        absent=_QWEN,
        ignored={"attention_bias": False, "mlp_bias": False},
        qkv_bias=True,
    ),
    "qwen3": Family(
        absent={**_QWEN, "head_dim": 128},
        ignored={"mlp_bias": False},
        qk_norm=True,
    ),
}  # fmt: skip
UNSUPPORTED: dict[str, str] = {}  # what some other model types would need
_REQUIRED = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
_ABSENT_IN_ALL = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), False),
    "rms_norm_eps": 1e-6,
}
# Keys that change the computation, and the values that are supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "is_causal": (None, True),
    "add_cross_attention": (None, False),
}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig, from the content of a config.json. `rope_parameters` is a dict."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"a model's configuration must be a JSON object, got {type(config).__name__}")
    if (kind := str(config.get("model_type"))) in UNSUPPORTED:
        name = next(iter(config.get("architectures") or ()), kind)
        raise ConfigError(f"{name} is not supported: {UNSUPPORTED[kind]}")
    family = FAMILIES[str(check_choice("model_type", config.get("model_type"), FAMILIES))]
    return (family.read or fields_of)(family, config)


def fields_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that most families have."""
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ConfigError(f"the model's configuration lacks {', '.join(missing)}")
    _refuse_unsupported(config, {**_ONLY, **family.only})
    config = {**_ABSENT_IN_ALL, **family.absent, **config, **family.ignored}
    check_int("max_position_embeddings", config["max_position_embeddings"], 1, MAX_LENGTH)
    attention_bias = check_bool("attention_bias", config["attention_bias"])
    return {
        "model_type": config["model_type"],
        **{name: config[name] for name in (*_REQUIRED, "max_position_embeddings", "rms_norm_eps", "mlp_bias")},
        "tie_word_embeddings": config["tie_word_embeddings"],
        "num_key_value_heads": config["num_key_value_heads"] or 0,
        "head_dim": config.get("head_dim") or 0,
        "rope_parameters": rope_of(config, partial=family.partial_rotary),
        "qkv_bias": attention_bias or family.qkv_bias,
        "out_bias": attention_bias,
        "qk_norm": family.qk_norm,
        "sliding_windows": windows_of(config),
        "eos_token_id": tuple(dict.fromkeys(eos_ids_in(config))),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def _refuse_unsupported(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for name, allowed in only.items():
        if config.get(name) not in allowed:
            supported = " or ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ConfigError(f"{name} is {config.get(name)!r}; supported is {supported}")


def rope_of(config: Mapping[str, Any], partial: bool = False) -> dict[str, Any]:
    """`rope_parameters`, or the earlier form: `rope_scaling` with `rope_theta` beside it."""
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(written, Mapping) or any(isinstance(value, Mapping) for value in written.values()):
        raise ConfigError(f"rope must be one set of parameters for all layers, got {written!r}")
    written = {**{name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}, **written}
    _refuse_unsupported(written, {} if partial else {"partial_rotary_factor": (None, 1)})
    if (original := config.get("original_max_position_embeddings")) is not None:
        written["original_max_position_embeddings"] = original  # it takes precedence, as in transformers
    return written


def windows_of(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer. Without layer_types, layers from max_window_layers on have it."""
    layers = check_int("num_hidden_layers", config["num_hidden_layers"], 1, 1 << 16)
    first = check_int("max_window_layers", config["max_window_layers"], 0, MAX_LENGTH)
    window = config.get("sliding_window") if check_bool("use_sliding_window", config["use_sliding_window"]) else None
    if (types := config.get("layer_types")) is None:
        return tuple(None if number < first else window for number in range(layers))
    meaning = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if not isinstance(types, list) or len(types) != layers or not all(str(kind) in meaning for kind in types):
        raise ConfigError(f"layer_types must be {' or '.join(meaning)} for each of {layers} layers, got {types!r}")
    return tuple(meaning[kind] for kind in types)
