"""Streams: weights that are read some rows at a time, only once, while a linear layer packs them.

So a model that is packed for a CPU, or quantized, is never in memory twice. A matrix may hold plain numbers or be
encoded; neighbours with different encodings stay several matrices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from phase2_prefill_decode.loading.checkpoint import ENCODED, Source
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import (
    EMBED_TOKENS,
    HEAD,
    NORM,
    LayerWeights,
    Weights,
    check_tensors,
    load_weights,
)


class Encoded(Protocol):
    """Rows of a matrix that are not plain numbers. The module that creates them also provides their product."""

    @property
    def shape(self) -> torch.Size: ...

    def __len__(self) -> int: ...

    def by_rows(self) -> dict[str, Tensor]:
        """Its tensors that have a row for each output."""

    def with_rows(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> "Encoded":
        """The same with other tensors, on their device, for products in a dtype."""

    def rows(self, tokens: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Some rows as plain numbers, as of an embedding."""

    def joins(self, other: Any) -> bool:
        """Whether one matrix can have the rows of both."""


Rows = Tensor | Encoded


@dataclass(frozen=True, slots=True)
class Stream:
    """A matrix that is read while it is packed or copied, some rows at a time, and only once."""

    length: int
    parts: Iterator[Rows]
    dtype: torch.dtype  # what products are computed in

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Rows]:
        for part in self.parts:
            yield part.to(self.dtype) if isinstance(part, Tensor) else part.with_rows(part.by_rows(), self.dtype)

    def whole(self, device: str | torch.device) -> Rows:
        """All its rows on a device, in memory that is allocated once."""
        made: dict[str, Tensor] = {}
        end = 0
        for part in self.parts:
            tensors = {"": part} if isinstance(part, Tensor) else part.by_rows()
            start, end = end, end + len(part)
            for name, tensor in tensors.items():
                if start == 0:
                    dtype = self.dtype if isinstance(part, Tensor) else tensor.dtype
                    made[name] = torch.empty((self.length, *tensor.shape[1:]), dtype=dtype, device=device)
                made[name][start:end].copy_(tensor)
        return made[""] if isinstance(part, Tensor) else part.with_rows(made, self.dtype)


# What a linear layer is made of. Several: their rows, one after the other.
Matrix = Rows | Stream | tuple[Rows | Stream, ...]


def weights_for_gpu(source: Source, config: ModelConfig, device: torch.device, *, progress: bool = False) -> Weights:
    """Load the weights of a model. A quantized one is loaded layer by layer."""
    if all(stored.dtype != ENCODED for stored in source.stored.values()):
        return load_weights(source, config, device, progress=progress)
    check_tensors(source, config)
    return by_layers(source, config, device, streamed=False, progress=progress)


def weights_for_cpu(source: Source, config: ModelConfig, device: torch.device, *, progress: bool = False) -> Weights:
    """Load the weights of a model; each matrix is read when it is packed."""
    check_tensors(source, config)
    return by_layers(source, config, device, streamed=True, progress=progress)


def by_layers(
    source: Source, config: ModelConfig, device: torch.device, *, streamed: bool, progress: bool = False
) -> Weights:
    """Load layer by layer: a layer is read when it is taken, and a matrix of `streamed` weights when it is packed."""
    loader = _Loader(source, config, device, streamed)
    tied = config.tie_word_embeddings
    table = replace(loader, streamed=streamed and tied)  # what is looked up only is not packed
    embed_tokens = table.matrix(EMBED_TOKENS)
    lm_head = embed_tokens if tied else loader.matrix(HEAD)
    hidden = None if progress else True  # None: unless the error stream is a terminal
    numbers = tqdm(range(config.num_hidden_layers), "Loading weights", unit="layer", leave=False, disable=hidden)
    return Weights(embed_tokens, map(loader.layer, numbers), loader.vector(NORM), lm_head)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the tensors of a source as the decoder uses them."""

    source: Source
    config: ModelConfig
    device: torch.device
    streamed: bool  # matrices are read when they are packed

    def layer(self, number: int) -> LayerWeights:
        tensors: dict[str, Any] = {}
        for field, (modules, inputs, bias) in self.config.layers[number].tensors(self.config).items():
            names = [f"model.layers.{number}.{module}" for module in modules]
            read = self.matrix if inputs else self.vector
            tensors[field] = read(*(f"{name}.weight" for name in names))
            if bias:
                tensors[f"{field}_bias"] = self.vector(*(f"{name}.bias" for name in names))
        return tensors

    def vector(self, *names: str) -> Tensor:
        """Several vectors in one."""
        (stream,) = self.streams(names)
        vector = stream.whole(self.device)
        assert isinstance(vector, Tensor)  # nothing encodes one
        return vector

    def matrix(self, *names: str) -> Matrix:
        """The rows of all these in one matrix. If neighbours have different encodings, they stay
        several."""
        streams = self.streams(names)
        matrices = tuple(streams) if self.streamed else tuple(stream.whole(self.device) for stream in streams)
        return matrices[0] if len(matrices) == 1 else matrices

    def streams(self, names: Iterable[str]) -> list[Stream]:
        groups: list[list[Iterator[Rows]]] = []
        rows: list[int] = []
        last: Rows | None = None
        for name in names:
            chunks = self.source.chunks(name)
            first = next(chunks)
            if last is None or not joins(last, first):
                groups.append([])
                rows.append(0)
            groups[-1].append(chain([first], chunks))
            rows[-1] += self.source.stored[name].shape[0]
            last = first
        dtype = getattr(torch, self.config.dtype)
        return [Stream(count, chain.from_iterable(group), dtype) for count, group in zip(rows, groups, strict=True)]


def joins(first: Rows, second: Rows) -> bool:
    """Whether one matrix can have the rows of both."""
    return isinstance(second, Tensor) if isinstance(first, Tensor) else first.joins(second)
