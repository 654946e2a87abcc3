"""`python -m phase2_prefill_decode.lab models.takes`: what published models take, from their config.json alone.

Parameters, keys and values in bfloat16, and the arithmetic of the last token of a context: computed, not measured.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase1_kv_pool.extras.layer_groups import GroupedLayout, LayerGroups
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.extras.families.layer import SHARED_EXPERT
from phase2_prefill_decode.extras.families.stateful import state_bytes
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.models.published import PUBLISHED, published
from phase2_prefill_decode.loading.config import ModelConfig

CONTEXT = 32_768  # tokens of a request
IN_FLIGHT = 2048  # tokens of a request that are computed before pages are freed
BATCHES = 1, 8, 64, 512  # requests that decode together
BY_BATCH = "Qwen3-8B", "Mixtral-8x7B", "OLMoE-1B-7B", "Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3.6-35B-A3B"


class Latent(NamedTuple):
    """Multi-head latent attention (MLA): the keys and values of all heads are products of one stored vector."""

    layers: int
    heads: int
    latent: int  # kv_lora_rank: of the vector that becomes keys and values
    rotated: int  # qk_rope_head_dim: of a key that all heads share, with its position
    key: int  # qk_nope_head_dim: of a head's key without position
    value: int  # v_head_dim

    # region exercise 10.6
    @property
    def numbers_stored(self) -> int:
        """Of one token, in all layers."""
        return self.layers * (self.latent + self.rotated)

    @property
    def numbers_per_head(self) -> int:
        """Of one token, in all layers, if the keys and values of each head were stored instead."""
        return self.layers * self.heads * (self.key + self.rotated + self.value)

    @property
    def operations_per_key(self) -> int:
        """Of one query with one key in one layer, over what is stored: the products that make keys of the vector are
        moved to the query, those that make values to the result."""
        return 2 * self.heads * (self.latent + self.rotated + self.latent)

    # endregion


LATENT = {"DeepSeek-V3": Latent(layers=61, heads=128, latent=512, rotated=64, key=128, value=128)}


def paged(config: ModelConfig) -> ModelConfig:
    """The same model with only the layers whose keys and values are in pages."""
    layers = tuple(layer for layer in config.layers if layer.paged)
    return replace(config, layers=layers, num_hidden_layers=len(layers))


def reachable(config: ModelConfig, context: int) -> int:
    """The bytes of keys and values that the next token can see: of a layer with a window, those in it."""
    layout = config.kv_layout()
    tokens = sum(context if window is None else min(window, context) for window in paged(config).windows)
    return tokens * layout.bytes_per_token // layout.layers


def held(config: ModelConfig, context: int) -> int:
    """The most bytes of pages that a request of this length holds, if layers with windows give theirs back."""
    layout, groups = config.kv_layout(), LayerGroups.of(paged(config).windows, IN_FLIGHT)
    layout = layout if groups is None else GroupedLayout.of(layout, groups)
    return layout.pages_for(context) * layout.bytes_per_page


def weights_read(config: ModelConfig, requests: int = 1) -> float:
    """The parameters of the matrices that a decode of this many requests reads, with lm_head. Of experts it counts
    the ones that some token chose, if all are equally likely."""
    cost = CostModel(config).pieces([(0, 1)] * requests)
    return (cost.linears + cost.head).weights / DTYPE_BYTES[config.dtype]


def operations(config: ModelConfig, context: int) -> tuple[int, int]:
    """Operations for the last token of a context: all of them, and the part of attention."""
    cost = CostModel(config).pieces([(context - 1, 1)])
    return cost.operations, cost.attention.operations


def takes(config: ModelConfig) -> dict[str, Any]:
    """The figures of one model."""
    layout, (total, attention) = config.kv_layout(), operations(config, CONTEXT)
    return {
        "parameters": config.parameters / 1e9,
        "active": weights_read(config) / 1e9,
        "kv_bytes": layout.bytes_per_token,
        "state_bytes": state_bytes(config),
        "state_tokens": state_bytes(config) / layout.bytes_per_token,  # whose keys and values take as much
        "kv_gigabytes": layout.bytes_per_token * CONTEXT / 1e9,
        "reachable_gigabytes": reachable(config, CONTEXT) / 1e9,
        "held_gigabytes": held(config, CONTEXT) / 1e9,
        "gflop": total / 1e9,
        "attention_share": attention / total,
        "attention_intensity": attention / reachable(config, CONTEXT),
    }


def by_batch(config: ModelConfig) -> dict[str, float]:
    """The weights in GB that a decode reads, by the requests in it; of those the share of one request, and those of
    shared experts."""
    size = DTYPE_BYTES[config.dtype] / 1e9
    read = {requests: weights_read(config, requests) * size for requests in BATCHES}
    step = {f"step_{requests}": each for requests, each in read.items()}
    tensors = [item for layer in config.layers for item in layer.tensors(config).items()]
    shared = [tensor for name, tensor in tensors if name.startswith(SHARED_EXPERT)]
    numbers = sum(sum(tensor.modules.values()) * tensor.inputs for tensor in shared)
    each_request = {f"request_{requests}": each / requests for requests, each in read.items()}
    return step | each_request | {"shared": numbers * size}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab models.takes", __doc__)
    options = p.parse_args(arguments)
    figures: dict[str, Any] = {name.replace(".", "_"): takes(published(name)) for name in PUBLISHED}
    names = "", "billions", "active", "KV B", "GB", "reach", "held", "GFLOP", "of it"
    shown = [
        "parameters",
        "active",
        "kv_bytes",
        "kv_gigabytes",
        "reachable_gigabytes",
        "held_gigabytes",
        "gflop",
        "attention_share",
    ]
    rows = [(name, *(row[column] for column in shown)) for name, row in zip(PUBLISHED, figures.values(), strict=True)]
    console = Console(highlight=False)
    console.print(table(names, rows, 2, f"Billions of parameters, and a request of {CONTEXT:,} tokens"))
    for name, latent in LATENT.items():
        size = DTYPE_BYTES["bfloat16"]
        row = {
            "kv_bytes": latent.numbers_stored * size,
            "per_head_bytes": latent.numbers_per_head * size,
            "times": latent.numbers_per_head / latent.numbers_stored,
            "intensity": latent.operations_per_key * latent.layers / (latent.numbers_stored * size),
        }
        figures[name] = row
        console.print(f"\n{name} stores {row['kv_bytes']:,} bytes of a token, instead of {row['per_head_bytes']:,}")
    rates = {name.replace(".", "_"): by_batch(published(name)) for name in BY_BATCH}
    figures["by_batch"] = rates
    rows = [(name, *(row[f"step_{requests}"] for requests in BATCHES)) for name, row in rates.items()]
    console.print("", table(("", *map(str, BATCHES)), rows, title="GB of weights read, by number of requests"))
    finish(p, options, arguments, figures, console=console)
    return 0
