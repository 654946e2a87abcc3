"""Small checkpoints in each quantized format, and the weights that the format's own library makes of them.

compressed-tensors is installed with the tests, and imported where it is used. GPTQModel and AutoAWQ are not: their
layouts are written here number by number, as their `pack` and `unpack` have them; to dequantize is one line.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.phase2_prefill_decode.models import tiny_model

Parts = dict[str, Tensor]
Made = tuple[Parts, Tensor]  # the tensors of a matrix, and the weight that the library makes of them
GROUP = 16


def in_8_bits(rows: Tensor, group: int) -> Tensor:
    """What a CPU's product of integers makes of rows, in float64: of a group, parts of like size and at most 128 inputs
    are whole numbers up to 127 times a scale."""
    parts = -(-group // 128)
    size = -(-group // (8 * parts)) * 8
    split = [part for own in rows.float().split(group, -1) for part in own.split(size, -1)]
    largest = [part.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) for part in split]
    return torch.cat(
        [(part * (127 / most)).round().double() * (most / 127) for part, most in zip(split, largest, strict=True)], -1
    )


def with_rows_in_8_bits(
    model: PreTrainedModel, group_of: Callable[[str], int], orders: Callable[[str, int], Tensor] | None = None
) -> PreTrainedModel:
    """The same model, whose matrices of integers are multiplied with such rows. `group_of`: the group of each matrix, 0
    for those that are not of integers; a group's inputs are neighbours in the order that `orders` gives."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (group := group_of(f"{name}.weight")):
            width = module.in_features
            order = torch.arange(width) if orders is None else orders(name, width)

            def rounded(_: object, rows: tuple[Tensor], group: int = group, order: Tensor = order) -> Tensor:
                return in_8_bits(rows[0][..., order], min(group, len(order)))[..., order.argsort()].float()

            module.register_forward_pre_hook(rounded)
    return model


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model as checkpoints have them: each expert apart."""
    for name, weight in model.named_parameters():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".mlp.experts"):
            yield name, weight
            continue
        modules = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, matrix in enumerate(weight):
            for module, part in zip(modules, matrix.chunk(len(modules)), strict=True):
                yield f"{place}.{expert}.{module}.weight", part


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantized(
    directory: Path, make: Callable[[Tensor], Made], config: dict[str, Any], family: str = "qwen3", **options: Any
) -> PreTrainedModel:
    """Save a small model with quantized layers. Returns the model of the dequantized weights."""
    model = tiny_model(family, **options)
    tensors: Parts = {}
    with torch.no_grad():
        for name, weight in parameters(model):
            if is_quantized(name):
                parts, dequantized = make(weight)
                tensors |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
                weight.copy_(dequantized)
            else:
                tensors[name] = weight.detach().clone()
    model.config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors")
    file = directory / "config.json"
    written = json.loads(file.read_text()) | {"quantization_config": config}
    file.write_text(json.dumps(written, default=str))
    return model


# compressed-tensors.


SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 words": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": GROUP}),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    "int4 zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
    "int4 channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]},
    ),
}


def compressed_config(name: str) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    format, weights = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=format)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["lm_head"])
    written: dict[str, Any] = config.model_dump(mode="json")
    return written


def compressed(name: str, scale_dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensor], Made]:
    format, weights = SCHEMES[name]

    def make(weight: Tensor) -> Made:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=format)
        compressor = BaseCompressor.get_value_from_registry(format)
        out, inputs = weight.shape
        rows, group = {"tensor": (out, inputs), "channel": (1, inputs), "group": (1, GROUP), "block": (32, 16)}[
            weights["strategy"]
        ]
        blocks = torch.nn.functional.pad(weight, (0, 0, 0, -out % rows)).reshape(-1, rows, inputs // group, group)
        largest = {4: 7, 8: 127}[weights["num_bits"]] if "type" not in weights else 448
        parts = {"weight": weight, "weight_scale": (blocks.abs().amax((1, 3)) / largest).to(scale_dtype)}
        if not weights.get("symmetric", True):
            parts["weight_zero_point"] = torch.randint(-3, 4, parts["weight_scale"].shape, dtype=torch.int8)
        made = compressor.compress(parts, scheme)
        return made, compressor.decompress(made, scheme)["weight"]

    return make


# GPTQ and AWQ.


def words(numbers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of the numbers of each row; number i of a word is at place `places[i]` in it."""
    count = 32 // bits
    made = torch.zeros(len(numbers), numbers.shape[1] // count, dtype=torch.int64)
    for i, place in enumerate(places or range(count)):
        made |= numbers[:, i::count].long() << (place * bits)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).int()


def random_scales(*shape: int) -> Tensor:
    return (torch.rand(shape) * 0.04 + 0.01).half()


ONES = {4: 0x11111111, 8: 0x01010101}


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False} | changes


def gptq(
    bits: int = 4, version: int = 1, group_of: Callable[[int], Tensor] | None = None, symmetric: bool = False
) -> Callable[[Tensor], Made]:
    """`group_of`: the group of each of so many inputs; by default those of neighbours."""

    def make(weight: Tensor) -> Made:
        out, inputs = weight.shape
        groups = inputs // GROUP
        g_idx = torch.arange(inputs) // GROUP if group_of is None else group_of(inputs)
        numbers = torch.randint(0, 1 << bits, (inputs, out))
        zeros = torch.randint(0, 1 << bits, (groups, out))
        if symmetric:
            zeros.fill_(1 << (bits - 1))
        scales = random_scales(groups, out) / (1 << (bits - 4))
        parts = {
            "qweight": words(numbers.t(), bits).t(),
            "qzeros": words(zeros, bits) - (2 - version) * ONES[bits],  # a zero of 0 borrows from the next
            "scales": scales,
            "g_idx": g_idx.int(),
        }
        return parts, (scales[g_idx] * (numbers - zeros[g_idx])).t()

    return make


AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def awq(weight: Tensor) -> Made:
    out, inputs = weight.shape
    numbers, zeros = torch.randint(0, 16, (inputs, out)), torch.randint(0, 16, (inputs // GROUP, out))
    scales = random_scales(inputs // GROUP, out)
    parts = {"qweight": words(numbers, 4, AWQ_PLACES), "qzeros": words(zeros, 4, AWQ_PLACES), "scales": scales}
    spread = [tensor.repeat_interleave(GROUP, 0) for tensor in (zeros, scales)]
    return parts, ((numbers - spread[0]) * spread[1]).t()
