"""`python -m phase2_prefill_decode.lab models.takes`: what published models take, from their config.json alone.

Parameters, keys and values in bfloat16, and the arithmetic of the last token of a context: computed, not measured.
"""

from typing import Any, NamedTuple

from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.models.published import PUBLISHED, published
from phase2_prefill_decode.loading.config import ModelConfig

CONTEXT = 32_768  # tokens of a request


class Latent(NamedTuple):
    """Multi-head latent attention (MLA): the keys and values of all heads are products of one stored vector."""

    layers: int
    heads: int
    latent: int  # kv_lora_rank: of the vector that becomes keys and values
    rotated: int  # qk_rope_head_dim: of a key that all heads share, with its position
    key: int  # qk_nope_head_dim: of a head's key without position
    value: int  # v_head_dim

    # region exercise 10.3
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


def reachable(config: ModelConfig, context: int) -> int:
    """The bytes of keys and values that the next token can see: of a layer with a window, those in it."""
    layout = config.kv_layout()
    tokens = sum(context if window is None else min(window, context) for window in config.windows)
    return tokens * layout.bytes_per_token // layout.layers


def takes(config: ModelConfig) -> dict[str, Any]:
    """The figures of one model."""
    layout, cost = config.kv_layout(), CostModel(config).pieces([(CONTEXT - 1, 1)])
    return {
        "parameters": config.parameters / 1e9,
        "kv_bytes": layout.bytes_per_token,
        "kv_gigabytes": layout.bytes_per_token * CONTEXT / 1e9,
        "reachable_gigabytes": reachable(config, CONTEXT) / 1e9,
        "gflop": cost.operations / 1e9,
        "attention_share": cost.attention.operations / cost.operations,
        "attention_intensity": cost.attention.operations / cost.attention.kv_read,
        "requests_in_80_gb": layout.requests_in(80 * 10**9 - config.bytes, CONTEXT),
    }


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab models.takes", __doc__)
    options = p.parse_args(arguments)
    figures: dict[str, Any] = {name.replace(".", "_"): takes(published(name)) for name in PUBLISHED}
    names = "", "parameters", "KV bytes", "GB KV", "in reach", "GFLOP", "attention"
    rows = [
        (name, *(row[column] for column in list(row)[:6]))
        for name, row in zip(PUBLISHED, figures.values(), strict=True)
    ]
    console = Console(highlight=False)
    console.print(table(names, rows, 3, f"Billions of parameters, and a request of {CONTEXT:,} tokens"))
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
    finish(p, options, arguments, figures, console=console)
    return 0
