"""Shard: the part of a model that one rank holds. A rank copies no more than this from the checkpoint.

q_proj, gate_proj, up_proj   some rows: whole heads, or some of the MLP's inner numbers ("column parallel")
k_proj, v_proj               the rows of its KV heads; with more ranks than KV heads, several hold the same one
o_proj, down_proj            the columns that multiply what its own rows computed ("row parallel")
embed_tokens, lm_head        some rows of the vocabulary
norms                        all; sinks: those of its heads
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode import connect
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.extras.streams import Rows, by_layers
from phase2_prefill_decode.loading.checkpoint import Source
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import Weights, check_tensors
from phase2_prefill_decode.model import Transform

ALL = slice(None)
ROW_PARALLEL = "o_proj", "down_proj"  # these multiply what a rank has computed, so it has some of their columns
COLUMN_PARALLEL = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "sinks"
VOCABULARY = "embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` of a model."""

    config: ModelConfig  # of the whole model
    rank: int
    size: int

    @property
    def tokens_of_each(self) -> list[range]:
        """The rows of the vocabulary that each rank holds. Their numbers differ by one at most."""
        return [_share(self.config.vocab_size, rank, self.size) for rank in range(self.size)]

    @property
    def tokens(self) -> range:
        return self.tokens_of_each[self.rank]

    # region exercise 12.1
    def places(self, name: str, shape: tuple[int, ...]) -> tuple[slice, slice]:
        """The rows and the columns of a checkpoint's tensor that this rank holds."""
        *_, module, kind = name.split(".")
        if module in ROW_PARALLEL:
            return (ALL, ALL) if kind == "bias" else (ALL, _slice(_share(shape[1], self.rank, self.size)))
        if module in VOCABULARY:
            return _slice(self.tokens), ALL
        if module not in COLUMN_PARALLEL:
            return ALL, ALL
        kv_heads = self.config.num_key_value_heads
        if module in ("k_proj", "v_proj") and self.size > kv_heads:  # one head, which several ranks have
            return _slice(_share(shape[0], self.rank * kv_heads // self.size, kv_heads)), ALL
        return _slice(_share(shape[0], self.rank, self.size)), ALL

    # endregion


class ShardedCheckpoint:
    """A checkpoint that looks as if it held only one rank's part. Rows of other ranks are not read, since a chunk is
    a mapping of the file."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self.directory, self.faults, self._source = source.directory, source.faults, source
        self._places = {name: shard.places(name, tensor.shape) for name, tensor in source.stored.items()}
        self.stored = {
            name: replace(
                tensor, shape=tuple(_length(*pair) for pair in zip(tensor.shape, self._places[name], strict=False))
            )
            for name, tensor in source.stored.items()
        }

    def nbytes(self, config: ModelConfig) -> int | None:
        return self._source.nbytes(config)

    def chunks(self, name: str) -> Iterator[Rows]:
        """The rank's rows of a tensor, some at a time."""
        rows, columns = self._places[name]
        end = 0
        for chunk in self._source.chunks(name):
            start, end = end, end + len(chunk)
            first = max(rows.start or 0, start) - start
            last = (end if rows.stop is None else min(rows.stop, end)) - start
            if first < last:
                yield _part(chunk, slice(first, last), columns, name)


def load_part(
    directory: str | Path,
    shard: Shard,
    device: torch.device,
    transform: Transform | None,
    *,
    progress: bool = False,
) -> Weights:
    """Load the weights of a rank."""
    source = connect.source_of(directory, shard.config)
    check_tensors(source, shard.config)
    own: Source = ShardedCheckpoint(source, shard)
    if transform is not None:
        own = transform(own, shard.config, device)
    return by_layers(own, shard.config, device, streamed=device.type == "cpu", progress=progress)


def _part(chunk: Rows, rows: slice, columns: slice, name: str) -> Rows:
    if isinstance(chunk, Tensor):
        return chunk[rows] if columns == ALL else chunk[rows, columns]
    assert isinstance(chunk, QuantizedWeight)
    try:
        return chunk.part(rows, columns)
    except ValueError as error:
        raise ConfigError(f"tensor_parallel_size does not suit {name}: {error}") from error


def _share(count: int, number: int, shares: int) -> range:
    return range(count * number // shares, count * (number + 1) // shares)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _length(size: int, part: slice) -> int:
    return len(range(*part.indices(size)))
