"""compressed-tensors, which llm-compressor writes: 4-bit numbers packed into words, and int8 or float8 as they are.
The block-scaled float8 of DeepSeek and Qwen differs only in names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phase0_request.support.checks import ConfigError, check_choice, check_int
from phase2_prefill_decode.extras.quantized.layout import FLOATS, MAX_GROUP, WORDS, TensorSpec, groups, only

if TYPE_CHECKING:
    from torch import Tensor

    from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

PLAIN, PACKED = ("int-quantized", "float-quantized", "naive-quantized"), "pack-quantized"
DTYPES = {"int": "I8", "float": "F8_E4M3"}
STRATEGIES = "tensor", "channel", "group", "block"
SCHEME = "num_bits", "type", "strategy", "group_size", "block_structure"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    bits: int
    kind: str  # what the numbers are: int or float
    rows: int  # outputs that share a scale; -1: all
    group: int  # inputs that do; -1: all
    packed: bool = False
    scale: str = "weight_scale"

    unused = (  # rows are rounded here, and a KV cache of 8 bits measures its own scales
        "input_scale", "input_zero_point", "output_scale", "activation_scale", "weight_shape", "k_scale", "v_scale",
    )  # fmt: skip

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "CompressedTensors":
        only(config, format=(*PLAIN, PACKED), transform_config=(None, {}))
        sparsity = (config.get("sparsity_config") or {}).get("format")
        only({"sparsity_config": sparsity}, sparsity_config=(None, "dense"))
        schemes = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        chosen: dict[str, Any]
        chosen, *others = [{"type": "int", **_given(scheme)} for scheme in schemes] or [{}]
        if any(other != chosen for other in others):
            raise ConfigError("quantization_config: its config_groups quantize weights differently; supported: one way")
        packed = config["format"] == PACKED
        only(chosen, num_bits=(4, 8) if packed else (8,), type=("int",) if packed else tuple(DTYPES))
        strategy = check_choice("strategy", chosen.get("strategy"), STRATEGIES)
        rows, group = -1 if strategy == "tensor" else 1, -1
        if strategy == "group":
            group = check_int("group_size", chosen.get("group_size"), 2, MAX_GROUP)
        elif strategy == "block":
            rows, group = _block(chosen.get("block_structure"))
        return cls(chosen["num_bits"], chosen["type"], rows, group, packed)

    @classmethod
    def from_fp8_config(cls, config: Mapping[str, Any]) -> "CompressedTensors":
        """A format of quant_method fp8: by blocks, or, as AutoFP8 writes it, with one scale per matrix."""
        only(config, fmt=(None, "e4m3"), scale_fmt=(None, "float"))
        if (block := config.get("weight_block_size")) is None:
            return cls(8, "float", -1, -1)
        return cls(8, "float", *_block(block), scale="weight_scale_inv")

    @property
    def main(self) -> str:
        return "weight_packed" if self.packed else "weight"

    @property
    def mark(self) -> str:
        return self.scale

    def size(self, main: tuple[int, ...]) -> tuple[int, int]:
        out, inputs = main
        return out, inputs * 32 // self.bits if self.packed else inputs

    def parts(self, out: int, inputs: int) -> dict[str, TensorSpec]:
        shape = 1 if self.rows == -1 else -(-out // self.rows), groups(inputs, self.group)
        main, zeros = (
            TensorSpec((DTYPES[self.kind],), (out, inputs)),
            TensorSpec((DTYPES[self.kind],), shape, optional=True),
        )
        if self.packed:
            main = TensorSpec(WORDS, (out, inputs * self.bits // 32))
            zeros = TensorSpec(WORDS, (-(-out * self.bits // 32), shape[1]), optional=True)
        group_of = TensorSpec(WORDS, (inputs,), optional=True)
        return {
            self.main: main,
            self.scale: TensorSpec(FLOATS, shape),
            "weight_zero_point": zeros,
            "weight_g_idx": group_of,
        }

    def read(self, parts: "Mapping[str, Tensor]") -> "QuantizedWeight":
        from phase2_prefill_decode.extras.quantized.numbers import order_of, values_of, whole_numbers, zeros_of
        from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

        values, scales, zeros = parts[self.main], parts[self.scale], parts.get("weight_zero_point")
        if zeros is not None and self.packed:
            zeros = zeros_of(whole_numbers(zeros.t(), self.bits).t()[: len(scales)], self.bits, scales)
        elif zeros is not None:
            zeros = zeros.to(scales.dtype) if bool(zeros.any()) else None
        weight = QuantizedWeight(
            values=values_of(values, self.bits) if self.packed else values.clone(),
            scales=self._of_rows(scales, len(values)),
            zeros=None if zeros is None else self._of_rows(zeros, len(values)),
        )
        return weight.in_order(order_of(parts["weight_g_idx"], self.group)) if "weight_g_idx" in parts else weight

    def _of_rows(self, numbers: "Tensor", out: int) -> "Tensor":
        """One number per output, made of one number for several outputs."""
        return numbers.repeat_interleave(out if self.rows == -1 else self.rows, 0)[:out]


def _given(scheme: Mapping[str, Any]) -> dict[str, Any]:
    return {name: scheme[name] for name in SCHEME if scheme.get(name) is not None}


def _block(written: Any) -> tuple[int, int]:
    if not isinstance(written, list | tuple) or len(written) != 2:
        raise ConfigError(f"quantization_config: a block must be two sizes, got {written!r}")
    rows, group = (check_int("the size of a block", size, 1, MAX_GROUP) for size in written)
    return rows, group
