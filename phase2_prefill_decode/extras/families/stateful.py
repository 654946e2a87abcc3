"""StatefulLayer: a layer that keeps a state of each request in place of pages, as data. It needs no torch."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from phase0_request.support.checks import ConfigError, check_bool, check_int
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.extras.families.layer import Experts
from phase2_prefill_decode.loading.config import LayerConfig, LayerTensor, ModelConfig

HEAD_NORM = "norm_of_heads"  # a checkpoint calls it norm, as it does norms that are from zero
SHARED = "input_layernorm", "post_attention_layernorm", "gate_up_proj", "down_proj"  # with layers of attention


class StateTensor(NamedTuple):
    """A tensor of a request's state in one layer."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulLayer(LayerConfig):
    """A layer with a state. A subclass has its sizes and names its tensors."""

    paged: ClassVar[bool] = False
    experts: Experts | None = None  # in place of the MLP

    def states(self, config: ModelConfig) -> tuple[StateTensor, ...]:
        """The state of a request."""
        raise NotImplementedError

    def mixer(self, config: ModelConfig) -> dict[str, LayerTensor]:
        """The tensors in place of attention's."""
        raise NotImplementedError

    def tensors(self, config: ModelConfig) -> dict[str, LayerTensor]:
        tensors = LayerConfig.tensors(self, config)
        return self.mixer(config) | {name: tensors[name] for name in SHARED} | _of_experts(self.experts, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvLayer(StatefulLayer):
    """A short convolution between two gates. Its state is the last inputs of the convolution."""

    taps: int  # inputs that an output sees, with its own
    bias: bool = False

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        check_int("conv_L_cache", self.taps, 2, 64)
        check_bool("conv_bias", self.bias)

    def states(self, config: ModelConfig) -> tuple[StateTensor, ...]:
        return (StateTensor((self.taps - 1, config.hidden_size), config.dtype),)

    def mixer(self, config: ModelConfig) -> dict[str, LayerTensor]:
        hidden = config.hidden_size
        return {
            "in_proj": LayerTensor({"conv.in_proj": 3 * hidden}, hidden, self.bias),
            "conv_weight": LayerTensor({"conv.conv": hidden * self.taps}),
            **({"conv_bias": LayerTensor({"conv.conv_bias": hidden})} if self.bias else {}),
            "out_proj": LayerTensor({"conv.out_proj": hidden}, hidden, self.bias),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer(StatefulLayer):
    """Gated DeltaNet: linear attention with a short convolution before it. Its state is a matrix per head, from keys to
    values, in float32, and the last inputs of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    taps: int
    tiled: bool = False  # value heads of one key head are that many key heads apart, not neighbours

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        check_int("linear_num_key_heads", self.key_heads, 1, 1 << 16)
        check_int("linear_num_value_heads", self.value_heads, self.key_heads, 1 << 16)
        check_int("linear_key_head_dim", self.key_dim, 1, 1 << 12)
        check_int("linear_value_head_dim", self.value_dim, 1, 1 << 12)
        check_int("linear_conv_kernel_dim", self.taps, 2, 64)
        if self.value_heads % self.key_heads:
            given = f"{self.value_heads} and {self.key_heads}"
            raise ConfigError(f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {given}")

    @property
    def sizes(self) -> tuple[int, int]:
        """The width of all keys, and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    def states(self, config: ModelConfig) -> tuple[StateTensor, ...]:
        keys, values = self.sizes
        return (
            StateTensor((self.taps - 1, 2 * keys + values), config.dtype),
            StateTensor((self.value_heads, self.key_dim, self.value_dim), "float32"),
        )

    def mixer(self, config: ModelConfig) -> dict[str, LayerTensor]:
        (keys, values), heads = self.sizes, self.value_heads
        own = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        vectors = {
            "conv1d": (2 * keys + values) * self.taps,
            "A_log": heads,
            "dt_bias": heads,
            HEAD_NORM: self.value_dim,
        }
        return {
            "in_proj": LayerTensor({f"linear_attn.{name}": rows for name, rows in own.items()}, config.hidden_size),
            **{name: LayerTensor({f"linear_attn.{name}": rows}) for name, rows in vectors.items()},
            "out_proj": LayerTensor({"linear_attn.out_proj": config.hidden_size}, values),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLayer(LayerConfig):
    """Attention whose results go through a gate, which is projected from its input."""

    experts: Experts | None = None

    def tensors(self, config: ModelConfig) -> dict[str, LayerTensor]:
        size = config.num_attention_heads * config.head_dim
        gate = LayerTensor({"self_attn.gate_proj": size}, config.hidden_size, config.qkv_bias)
        return LayerConfig.tensors(self, config) | {"gate_proj": gate} | _of_experts(self.experts, config)


def _of_experts(experts: Experts | None, config: ModelConfig) -> dict[str, LayerTensor]:
    return {} if experts is None else experts.tensors(config.hidden_size)


def has_states(config: ModelConfig) -> bool:
    return not all(layer.paged for layer in config.layers)


def state_bytes(config: ModelConfig) -> int:
    """The bytes of one request's states in all layers."""
    tensors = (each for layer in config.layers if isinstance(layer, StatefulLayer) for each in layer.states(config))
    return sum(prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)


def check_stateless(config: ModelConfig, what: str) -> None:
    """ConfigError if a layer of a model keeps states, which this does not work with."""
    if has_states(config):
        count = sum(not layer.paged for layer in config.layers)
        raise ConfigError(
            f"{what} is for models with attention in all layers; in {count} of the {len(config.layers)} layers of this "
            f"{config.model_type} a request has a state"
        )
