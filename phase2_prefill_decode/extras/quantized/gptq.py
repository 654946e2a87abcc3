"""GPTQ: a word holds eight (or four) inputs of one output, and the matrix lies transposed. Zeros are stored minus one
unless the checkpoint is a gptq_v2; with act-order, `g_idx` says which group an input belongs to.

The one is added to whole words, as GPTQModel does: it was subtracted from them, so a zero of 0 borrows from the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phase0_request.support.checks import check_choice, check_int
from phase2_prefill_decode.extras.quantized.layout import FLOATS, MAX_GROUP, WORDS, TensorSpec, groups, only

if TYPE_CHECKING:
    from torch import Tensor

    from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

LESS = {"gptq": 1, "gptq_v2": 0}  # by how much the stored zeros are less
ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GPTQ:
    bits: int
    group: int  # -1: the row
    less: int

    mark = main = "qweight"
    unused = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "GPTQ":
        only(config, bits=(4, 8), pack_dtype=(None, "int32"), dynamic=(None, {}))
        version = check_choice("checkpoint_format", config.get("checkpoint_format") or "gptq", LESS)
        group = config.get("group_size")
        return cls(config["bits"], -1 if group == -1 else check_int("group_size", group, 8, MAX_GROUP), LESS[version])

    def size(self, main: tuple[int, ...]) -> tuple[int, int]:
        words, out = main
        return out, words * 32 // self.bits

    def parts(self, out: int, inputs: int) -> dict[str, TensorSpec]:
        count = groups(inputs, self.group)
        return {
            "qweight": TensorSpec(WORDS, (inputs * self.bits // 32, out)),
            "qzeros": TensorSpec(WORDS, (count, out * self.bits // 32)),
            "scales": TensorSpec(FLOATS, (count, out)),
            "g_idx": TensorSpec(WORDS, (inputs,), optional=True),
        }

    def read(self, parts: "Mapping[str, Tensor]") -> "QuantizedWeight":
        from phase2_prefill_decode.extras.quantized.numbers import order_of, values_of, whole_numbers, zeros_of
        from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

        scales = parts["scales"].t().contiguous()
        zeros = whole_numbers(parts["qzeros"] + self.less * ONES[self.bits], self.bits).t()
        weight = QuantizedWeight(
            values=values_of(parts["qweight"].t(), self.bits), scales=scales, zeros=zeros_of(zeros, self.bits, scales)
        )
        return weight.in_order(order_of(parts["g_idx"], self.group)) if "g_idx" in parts else weight
