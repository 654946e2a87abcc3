"""`python -m phase2_prefill_decode.lab fits`: the bytes of a model in each format, and what a memory holds beside them.

The embedding and lm_head stay in bfloat16, as `--quantization` leaves them. Keys and values are in bfloat16 or 8 bits.
"""

from typing import Any

from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase2_prefill_decode.extras.quantized.quantize import GROUP
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig

MODELS = {
    "Qwen3-0.6B": SHAPES["596m"],
    "Qwen3-8B": ModelConfig(
        model_type="qwen3", vocab_size=151_936, num_hidden_layers=36, hidden_size=4096, intermediate_size=12_288,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, qk_norm=True,
    ),
    "Qwen3-32B": ModelConfig(
        model_type="qwen3", vocab_size=151_936, num_hidden_layers=64, hidden_size=5120, intermediate_size=25_600,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, qk_norm=True,
    ),
}  # fmt: skip
FORMATS = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP}  # bytes of a number, with its share of the scales
ROWS = {  # the formats of weights, and of keys and values
    "bfloat16": ("bfloat16", "bfloat16"), "int8": ("int8", "bfloat16"), "int4": ("int4", "bfloat16"),
    "int4_kv_int8": ("int4", "int8"),
}  # fmt: skip
MEMORIES = 8, 16, 24, 80  # GB
CONTEXT = 8192  # tokens of a request


def weight_bytes(config: ModelConfig, scheme: str) -> int:
    """Of all weights, with the matrices of the layers in a format."""
    layer = sum(sum(part.modules.values()) * part.inputs for part in config.layers[0].tensors(config).values())
    matrices = config.num_hidden_layers * layer
    return int(matrices * FORMATS[scheme]) + 2 * (config.parameters - matrices)


def fits(config: ModelConfig, scheme: str, kv_dtype: str = "bfloat16") -> dict[str, Any]:
    """The weights in GB, and for each memory how many requests of CONTEXT tokens fit beside them."""
    size, layout = weight_bytes(config, scheme), config.kv_layout(dtype=kv_dtype)
    requests = {f"memory_{memory}": layout.requests_in(memory * 10**9 - size, CONTEXT) for memory in MEMORIES}
    return {
        "gigabytes": size / 1e9,
        "fits": {f"memory_{memory}": size < memory * 10**9 for memory in MEMORIES},
    } | requests


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab fits", __doc__)
    options = p.parse_args(arguments)
    figures = {name: {row: fits(config, *formats) for row, formats in ROWS.items()} for name, config in MODELS.items()}
    rows = [
        (f"{name}, {formats.replace('_', ' ')}", row["gigabytes"], *(row[f"memory_{memory}"] for memory in MEMORIES))
        for name, schemes in figures.items()
        for formats, row in schemes.items()
    ]
    names = ("", "GB", *(f"{memory} GB" for memory in MEMORIES))
    Console(highlight=False).print(table(names, rows, title=f"Requests of {CONTEXT} tokens beside the weights"))
    finish(p, options, arguments, figures)
    return 0
