"""StatefulLayer: a layer that keeps a state of each request in place of pages, as data. It needs no torch."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from phase0_request.support.checks import ConfigError, check_bool, check_int
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.loading.config import LayerConfig, LayerTensor, ModelConfig

SHARED = "input_layernorm", "post_attention_layernorm", "gate_up_proj", "down_proj"  # with layers of attention


class StateTensor(NamedTuple):
    """A tensor of a request's state in one layer."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulLayer(LayerConfig):
    """A layer with a state. A subclass has its sizes and names its tensors."""

    paged: ClassVar[bool] = False

    def states(self, config: ModelConfig) -> tuple[StateTensor, ...]:
        """The state of a request."""
        raise NotImplementedError

    def mixer(self, config: ModelConfig) -> dict[str, LayerTensor]:
        """The tensors in place of attention's."""
        raise NotImplementedError

    def tensors(self, config: ModelConfig) -> dict[str, LayerTensor]:
        tensors = LayerConfig.tensors(self, config)
        return self.mixer(config) | {name: tensors[name] for name in SHARED}


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
