"""Format: the tensors of which a checkpoint makes a quantized matrix.

A server reads the config without torch, so a format imports torch only when it reads tensors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.loading.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

FLOATS = "F32", "F16", "BF16"  # safetensors' names
WORDS = ("I32",)  # each holds eight numbers of 4 bits, or four of 8
MAX_GROUP = 1 << 16
ROUTERS = "mlp.gate", "mlp.shared_expert_gate"  # small matrices: what they are rounded to decides what is computed
SCHEMES = {"int8": 1.0, "int4": 0.5625, "fp8": 1.0}  # at load: bytes of a number, with its scale


class TensorSpec(NamedTuple):
    """A tensor of a quantized matrix."""

    dtypes: tuple[str, ...]  # any of them
    shape: tuple[int, ...]
    optional: bool = False


class Format(Protocol):
    """How a checkpoint stores its quantized matrices. A matrix `m.weight` consists of tensors `m.SUFFIX`."""

    @property
    def mark(self) -> str:
        """The suffix that every quantized matrix has, and no other matrix."""

    @property
    def main(self) -> str:
        """The suffix of the tensor that holds the numbers."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of tensors that are not needed: they quantize activations, which stay in 16 bits here."""

    def size(self, main: tuple[int, ...]) -> tuple[int, int]:
        """[out, in] of a matrix, from the shape of its main tensor. ValueError if no matrix has that shape."""

    def parts(self, out: int, inputs: int) -> dict[str, TensorSpec]:
        """The tensors of such a matrix, by their suffixes. ConfigError if there can be no such matrix."""

    def read(self, parts: "Mapping[str, Tensor]") -> "QuantizedWeight":
        """The matrix of these tensors."""


def only(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Refuse a quantization_config whose values of these keys are not supported."""
    for name, values in allowed.items():
        value = config.get(name)
        if not any(value == each and type(value) is type(each) for each in values):  # 4.0 is not 4
            supported = ", ".join("none" if each is None else str(each) for each in values)
            raise ConfigError(f"quantization_config: {name} is {value!r}; supported: {supported}")


def groups(inputs: int, group: int) -> int:
    """The number of groups in a row. A group size of -1 means one."""
    if group == -1:
        return 1
    if inputs % group:
        raise ConfigError(f"its {inputs} inputs are no multiple of the group size {group}")
    return inputs // group


def bytes_in(config: ModelConfig, scheme: str) -> int:
    """The size of a model if the matrices of its layers are quantized in one of SCHEMES."""
    parts = (part for layer in config.layers for part in layer.tensors(config).values())
    matrices = sum(sum(part.modules.values()) * part.inputs for part in parts if not part.modules.keys() & {*ROUTERS})
    saved = DTYPE_BYTES[config.dtype] - SCHEMES[scheme]
    return config.bytes - int(matrices * saved)
