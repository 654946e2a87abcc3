"""AWQ: a word holds eight outputs of one input, in an order of its own that suits the GPU's instructions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phase0_request.support.checks import check_int
from phase2_prefill_decode.extras.quantized.layout import FLOATS, MAX_GROUP, WORDS, TensorSpec, groups, only

if TYPE_CHECKING:
    from torch import Tensor

    from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has its outputs


@dataclass(frozen=True, slots=True)
class AWQ:
    group: int  # -1: the row

    mark = main = "qweight"
    unused = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AWQ":
        version = {"version": str(config.get("version") or "gemm").lower()}
        only({**config, **version}, bits=(4,), version=("gemm",), backend=(None, "autoawq", "auto"))
        group = config.get("group_size")
        return cls(-1 if group == -1 else check_int("group_size", group, 8, MAX_GROUP))

    def size(self, main: tuple[int, ...]) -> tuple[int, int]:
        inputs, words = main
        return words * 8, inputs

    def parts(self, out: int, inputs: int) -> dict[str, TensorSpec]:
        count = groups(inputs, self.group)
        return {
            "qweight": TensorSpec(WORDS, (inputs, out // 8)),
            "qzeros": TensorSpec(WORDS, (count, out // 8)),
            "scales": TensorSpec(FLOATS, (count, out)),
        }

    def read(self, parts: "Mapping[str, Tensor]") -> "QuantizedWeight":
        from phase2_prefill_decode.extras.quantized.numbers import whole_numbers, zeros_of
        from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight, packed

        def numbers(words: "Tensor") -> "Tensor":
            """[out, in], in the order of the outputs."""
            return whole_numbers(words, 4).view(len(words), -1, 8)[..., PLACES].flatten(1).t()

        scales = parts["scales"].t().contiguous()
        zeros = zeros_of(numbers(parts["qzeros"]), 4, scales)
        return QuantizedWeight(values=packed(numbers(parts["qweight"])).contiguous(), scales=scales, zeros=zeros)
