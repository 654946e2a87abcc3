"""ModelConfig: the shape of a model, with the field names of a Hugging Face config.json, and a LayerConfig per layer.

Llama, Mistral, Qwen2 and Qwen3 are one architecture. They differ in biases, in norms of q and k, and in sliding
windows: these are fields here, and no other module asks for the model type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number
from phase0_request.support.model_files import model_eos_ids, naming, read_object
from phase1_kv_pool.layout import DTYPE_BYTES, KVLayout
from phase2_prefill_decode.loading.families import FAMILIES, MAX_LENGTH, read

MAX_VOCABULARY = 1 << 31  # token ids are int32
MAX_DIMENSION = 1 << 24
HEAD_DIMS = range(8, 257, 8)  # the kernels' head sizes


_YARN = "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # the parameters that each type has
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
    "longrope": ("factors", "short_factors", "original_max_position_embeddings", "attention_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """A model's rotary embedding. Parameters that its type lacks keep their defaults; see `rope`."""

    rope_type: str = "default"
    rope_theta: float = 10_000.0  # the last pair rotates nearly this many times slower than the first
    partial_rotary_factor: float = 1.0  # the part of a head that is rotated: its first numbers
    factor: float = 1.0  # by which the context was extended
    factors: tuple[float, ...] = ()  # longrope: of each pair
    short_factors: tuple[float, ...] = ()  # longrope: in their place, if no sequence exceeds the original context
    original_max_position_embeddings: int = 0  # the context before that
    low_freq_factor: float = 1.0  # llama3: pairs with fewer turns than this over that context are slowed by `factor`
    high_freq_factor: float = 4.0  # llama3: pairs with more turns than this are unchanged
    beta_slow: float = 1.0  # yarn: the same two bounds
    beta_fast: float = 32.0
    truncate: bool = True  # yarn: round the bounds outward to whole pairs
    attention_factor: float | None = None  # yarn and longrope: scale of queries and keys; None: from `factor`
    mscale: float = 0.0  # yarn: if both are set, they change the scale that follows from `factor`
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        used = ROPE_TYPES[check_choice("rope_type", self.rope_type, ROPE_TYPES)]
        check_number("rope_theta", self.rope_theta, 1, above=True)
        check_number("partial_rotary_factor", self.partial_rotary_factor, 0, 1)
        for parameter in fields(self)[3:]:
            value = getattr(self, parameter.name)
            if parameter.name not in used and value != parameter.default:
                raise ConfigError(f"rope_type {self.rope_type!r} has no parameter {parameter.name}, got {value!r}")
        check_number("rope factor", self.factor, 1)
        original = "original_max_position_embeddings"
        check_int(f"rope {original}", self.original_max_position_embeddings, int(original in used), MAX_LENGTH)
        check_number("rope low_freq_factor", self.low_freq_factor, 0, above=True)
        check_number("rope high_freq_factor", self.high_freq_factor, self.low_freq_factor, above=True)
        check_number("rope beta_slow", self.beta_slow, 0, above=True)
        check_number("rope beta_fast", self.beta_fast, self.beta_slow)
        check_bool("rope truncate", self.truncate)
        check_number("rope mscale", self.mscale, 0)
        check_number("rope mscale_all_dim", self.mscale_all_dim, 0)
        check_number("rope attention_factor", 1 if (f := self.attention_factor) is None else f, 0, above=True)

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], max_position_embeddings: int) -> "RopeParameters":
        """Read the `rope_parameters` of a config.json, or its `rope_scaling` with `rope_theta` added."""
        types = [name for name in ROPE_TYPES if name != "longrope"]  # whose factors its family chooses
        rope_type = check_choice("rope_type", written.get("rope_type") or written.get("type") or "default", types)
        names = "rope_theta", "partial_rotary_factor", *ROPE_TYPES[rope_type]
        known = {name: written[name] for name in names if written.get(name) is not None}
        if "original_max_position_embeddings" in names:
            known.setdefault("original_max_position_embeddings", max_position_embeddings)
        if rope_type == "yarn" and "factor" in written:  # null means: the ratio of the two lengths
            original = known["original_max_position_embeddings"]
            check_int("original_max_position_embeddings", original, 1, MAX_LENGTH)
            known.setdefault("factor", max_position_embeddings / original)
        if missing := {"factor", "low_freq_factor", "high_freq_factor"} & set(names) - known.keys():
            raise ConfigError(f"rope_type {rope_type!r} needs {', '.join(sorted(missing))}, got {dict(written)}")
        return cls(rope_type=rope_type, **known)


class LayerTensor(NamedTuple):
    """A tensor of a layer as the decoder uses it: rows of one or more modules of a checkpoint."""

    modules: Mapping[str, int]  # the rows of each, in their order
    inputs: int = 0  # the columns; 0: it is a vector
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A layer: attention and a gated MLP. A family with other layers describes them in a subclass."""

    paged: ClassVar[bool] = True  # it has keys and values in pages
    window: int | None = None  # tokens that a query sees, with its own; None: all
    rope: RopeParameters | None = None  # None: the model's

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("sliding_window", self.window, 1, MAX_LENGTH)

    def tensors(self, config: "ModelConfig") -> dict[str, LayerTensor]:
        """The tensors of this layer, by their names in LayerWeights."""
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        norms = {name: LayerTensor({f"self_attn.{name}": config.head_dim}) for name in ("q_norm", "k_norm")}
        return {
            "input_layernorm": LayerTensor({"input_layernorm": hidden}),
            "qkv_proj": LayerTensor(qkv, hidden, config.qkv_bias),
            **(norms if config.qk_norm else {}),
            "o_proj": LayerTensor({"self_attn.o_proj": hidden}, q, config.out_bias),
            "post_attention_layernorm": LayerTensor({"post_attention_layernorm": hidden}),
            "gate_up_proj": LayerTensor({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            "down_proj": LayerTensor({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model. The first four sizes are required; a size of 0 is replaced by the usual one. A wrong value
    raises a ValueError that names the field."""

    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int = 0  # 0: num_attention_heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    intermediate_size: int = 0  # 0: 8/3 of hidden_size, rounded up to a multiple of 64
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    max_position_embeddings: int = 2048
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False  # lm_head is embed_tokens
    layers: tuple[LayerConfig, ...] = ()  # (): all alike, without windows
    eos_token_id: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # weights' and activations'
    model_type: str = "llama"
    logits_multiplier: float = 1.0  # that the final norm has in it

    def __post_init__(self) -> None:
        check_int("vocab_size", self.vocab_size, 1, MAX_VOCABULARY)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            check_int(name, getattr(self, name), 1, MAX_DIMENSION)
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            check_int(name, getattr(self, name), 0, MAX_DIMENSION)
        check_int("max_position_embeddings", self.max_position_embeddings, 1, MAX_LENGTH)
        check_number("rms_norm_eps", self.rms_norm_eps, 0)
        for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
            check_bool(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPE_BYTES)
        check_choice("model_type", self.model_type, FAMILIES)
        check_number("logits_multiplier", self.logits_multiplier, 0, above=True)
        self._fill_in()
        for token in self.eos_token_id:
            check_int("eos_token_id", token, 0, self.vocab_size - 1)
        self._check_shapes()

    def _fill_in(self) -> None:
        """Replace sizes of 0 by the usual ones."""
        size, heads = self.hidden_size, self.num_attention_heads
        if not self.head_dim and size % heads:
            raise ConfigError(f"hidden_size {size} is no multiple of its {heads} heads, and head_dim is not given")
        values: dict[str, object] = {
            "num_key_value_heads": self.num_key_value_heads or heads,
            "head_dim": self.head_dim or size // heads,
            "intermediate_size": self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64,
            "layers": tuple(self.layers) or (LayerConfig(),) * self.num_hidden_layers,
            "eos_token_id": tuple(self.eos_token_id),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the only place that sets a frozen field

    def _check_shapes(self) -> None:
        if (heads := self.num_attention_heads) % (kv_heads := self.num_key_value_heads):
            given = f"{heads} and {kv_heads}"
            raise ConfigError(f"num_attention_heads must be a multiple of num_key_value_heads, got {given}")
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim must be a multiple of 8 from 8 to 256, got {self.head_dim}")
        if (described := len(self.layers)) != (layers := self.num_hidden_layers):
            raise ConfigError(f"layers must describe each of {layers} layers, got {described}")

    @classmethod
    def from_pretrained(cls, directory: str | Path, dtype: str | None = None) -> "ModelConfig":
        """From a model directory in Hugging Face layout. End-of-sequence tokens of config.json and of
        generation_config.json both count. `dtype` replaces the one of the file."""
        file = Path(directory) / "config.json"
        config, ends = read_object(file), model_eos_ids(file.parent)
        with naming(file):
            return cls.from_dict(config | ({"eos_token_id": ends} if ends else {}), dtype)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], dtype: str | None = None) -> "ModelConfig":
        """Read the content of a config.json. Absent keys have transformers' defaults."""
        known = read(config)
        rope = RopeParameters.from_dict(known["rope_parameters"], known["max_position_embeddings"])
        windows = known.pop("sliding_windows")
        known["layers"] = known.get("layers") or tuple(LayerConfig(window=window) for window in windows)
        return cls(**known | {"rope_parameters": rope, "dtype": dtype or known["dtype"]})

    def kv_layout(self, page_size: int = 16, dtype: str | None = None) -> KVLayout:
        """The layout of this model's keys and values in a pool: of one layer at least, so that pages count tokens."""
        layers = max(sum(layer.paged for layer in self.layers), 1)
        return KVLayout(layers, self.num_key_value_heads, self.head_dim, page_size, dtype or self.dtype)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied lm_head counts once."""
        parts = chain.from_iterable(layer.tensors(self).values() for layer in self.layers)
        layers = sum(sum(part.modules.values()) * (max(part.inputs, 1) + part.bias) for part in parts)
        ends = (1 if self.tie_word_embeddings else 2) * self.vocab_size + 1
        return layers + ends * self.hidden_size

    @property
    def bytes(self) -> int:
        """The size of the parameters in `dtype`."""
        return self.parameters * DTYPE_BYTES[self.dtype]
