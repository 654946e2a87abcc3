"""The decoder of a rank: the decoder of one device, with its part of the weights, and a collective in three places.

    o_proj, down_proj   the product of a rank is one term of a sum: an all-reduce follows
    embed_tokens        rank 0 sends the tokens, for it alone has those in flight. Each is in the table of one rank: the
                        others add zeros, and an all-reduce follows
    lm_head             a rank has the logits of its part of the vocabulary: rank 0 gathers them

Between these a rank computes alone: its heads attend to its own keys and values.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.linears import Product, Wrapped
from phase2_prefill_decode.extras.parallel.group import Group
from phase2_prefill_decode.extras.parallel.shard import Shard
from phase2_prefill_decode.extras.parallel.split import split
from phase2_prefill_decode.linear import Linear, Table
from phase2_prefill_decode.loading.weights import LayerWeights, Weights


class ParallelDecoder(Decoder):
    """A decoder that computes each step together with the decoders of the other ranks."""

    # region parallel
    def __init__(self, shard: Shard, weights: Weights, group: Group, backend: Backend) -> None:
        layers = weights.layers if shard.rank == 0 else map(without_biases, weights.layers)
        # A step in one call could not stop for the other ranks, twice per layer.
        backend = replace(backend, whole_step=lambda decoder: None)
        super().__init__(split(shard.config, shard.size), replace(weights, layers=layers), backend)
        self.group = group
        self.embed_tokens = VocabParallelEmbedding(self.embed_tokens, shard.tokens, group)
        for layer in self.layers:
            layer.self_attn.o_proj = row_parallel(layer.self_attn.o_proj, group)
            layer.mlp.down_proj = row_parallel(layer.mlp.down_proj, group)
        self.lm_head = gathered(self.lm_head, shard.tokens_of_each, group)

    # endregion


# region exercise 12.2
def row_parallel(linear: Linear, group: Group) -> Linear:
    """A linear layer of which each rank has some columns. Its result is the sum over all ranks."""

    def summed(product: Product) -> Product:
        return lambda rows, out=None: group.all_reduce(product(rows, out))

    return Wrapped(linear, summed)


def without_biases(layer: LayerWeights) -> LayerWeights:
    """A layer without the biases of its sums. Only rank 0 has them, so that each counts once."""
    return {name: tensor for name, tensor in layer.items() if name not in ("o_proj_bias", "down_proj_bias")}


# endregion


class VocabParallelEmbedding:
    """The rows of an embedding that this rank holds."""

    def __init__(self, table: Tensor | Table, held: range, group: Group) -> None:
        self.table = table
        self.held = held
        self.group = group

    # region embedding
    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The embeddings of rank 0's tokens, whichever rank's part of the vocabulary they are in: [tokens,
        hidden_size]."""
        places = self.group.broadcast(tokens) - self.held.start
        elsewhere = (places < 0) | (places >= len(self.held))
        places = places.masked_fill(elsewhere, 0)
        x = embedding(places, self.table) if isinstance(self.table, Tensor) else self.table.rows(places, dtype)
        return self.group.all_reduce(x.masked_fill(elsewhere[:, None], 0))

    # endregion


def gathered(lm_head: Linear, held: Sequence[range], group: Group) -> Linear:
    """An lm_head of which each rank has some rows, `held[rank]`. On rank 0 the result has the logits of all tokens;
    on the others it only has that shape."""
    most, vocab = max(map(len, held)), held[-1].stop

    def collected(product: Product) -> Product:
        def logits(rows: Tensor, out: Tensor | None = None) -> Tensor:
            own = product(rows)
            parts = group.gather(pad(own, (0, most - own.shape[1])))  # of one size: a gather needs that
            if not parts:
                return own[:, :1].expand(-1, vocab)
            return torch.cat([part[:, : len(tokens)] for part, tokens in zip(parts, held, strict=True)], 1, out=out)

        return logits

    return Wrapped(lm_head, collected)
