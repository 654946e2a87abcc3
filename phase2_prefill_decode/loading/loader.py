"""Loads weights: each tensor of a source is copied directly into its rows of a fused matrix. It is read some rows at a
time, so that the files are never in memory beside the model.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.support.checks import ConfigError
from phase0_request.support.memory import free_bytes
from phase2_prefill_decode.loading.checkpoint import ENCODED, Source
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.matrix import Matrix, Rows, Stream, joins
from phase2_prefill_decode.loading.weights import EMBEDDING, HEAD, NORM, LayerWeights, Weights, empty_weights, places

READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # plain numbers; other formats need a scale
HARMLESS = ("rotary_emb.inv_freq",)  # saved by earlier versions of transformers, and not needed
MAX_FAULTS = 20  # that one error lists


class Transform(Protocol):
    """Puts weights into another form while they are read."""

    def __call__(self, source: Source, config: ModelConfig, device: torch.device, /) -> Source: ...

    def nbytes(self, config: ModelConfig, /) -> int:
        """The memory that the weights of a model take in that form."""


def load_weights(
    source: Source,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    *,
    transform: Callable[[Source, ModelConfig, torch.device], Source] | None = None,
    progress: bool = False,
    layer_by_layer: bool = False,
) -> Weights:
    """Load the weights of a model in the dtype of its configuration.

    Missing, unexpected or misshapen tensors raise one ConfigError that lists them, before memory is allocated.
    `progress` shows a bar on a terminal. `layer_by_layer` reads a layer when it is taken, and on a CPU a matrix when it
    is packed.
    """
    check_tensors(source, config)
    device = torch.device(device)
    if transform is not None:
        source = transform(source, config, device)
    loader = _Loader(source, config, device, streamed=layer_by_layer and device.type == "cpu")
    tied = config.tie_word_embeddings
    table = replace(loader, streamed=loader.streamed and tied)  # what is looked up only is not packed
    embed_tokens = table.matrix(EMBEDDING)
    lm_head = embed_tokens if tied else loader.matrix(HEAD)
    norm = loader.vector(NORM)
    assert not isinstance(embed_tokens, tuple)  # its rows are of one kind
    hidden = None if progress else True  # None: unless the error stream is a terminal
    numbers = tqdm(range(config.num_hidden_layers), "Loading weights", unit="layer", leave=False, disable=hidden)
    layers = map(loader.layer, numbers)
    return Weights(embed_tokens, layers if layer_by_layer else tuple(layers), norm, lm_head)


def weight_bytes(source: Source, config: ModelConfig, transform: Transform | None) -> int | None:
    """The memory that the weights of a source take; None if some of them are not plain numbers."""
    if any(stored.dtype == ENCODED for stored in source.stored.values()):
        return None
    return config.bytes if transform is None else transform.nbytes(config)


def check_memory(size: int | None, device: torch.device, advice: str) -> None:
    """ConfigError if weights of this size are larger than the free memory."""
    free = free_bytes(device)
    if size is not None and free is not None and size > free:
        words = f"its weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free{advice}"
        raise ConfigError(f"the model does not fit: {words}")


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the tensors of a source as the decoder uses them."""

    source: Source
    config: ModelConfig
    device: torch.device
    streamed: bool  # matrices are read when they are packed

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    def layer(self, number: int) -> LayerWeights:
        tensors: dict[str, Any] = {}
        for field, (modules, inputs, bias) in self.config.layer.items():
            names = [f"model.layers.{number}.{module}" for module in modules]
            read = self.matrix if inputs else self.vector
            tensors[field] = read(*(f"{name}.weight" for name in names))
            if bias:
                tensors[f"{field}_bias"] = self.vector(*(f"{name}.bias" for name in names))
        return LayerWeights(**tensors)

    def vector(self, *names: str) -> Tensor:
        """Several vectors in one."""
        (stream,) = self.streams(names)
        vector = stream.whole(self.device)
        assert isinstance(vector, Tensor)  # nothing encodes one
        return vector

    def matrix(self, *names: str) -> Matrix:
        """The rows of all these in one matrix. Where one is encoded in another way than its neighbour, they stay
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
        return [
            Stream(count, chain.from_iterable(group), self.dtype) for count, group in zip(rows, groups, strict=True)
        ]


def check_tensors(source: Source, config: ModelConfig) -> None:
    """ConfigError if a source does not hold the tensors of a configuration, and no others."""
    layers = {name.split(".")[2] for name in source.stored if name.startswith("model.layers.")}
    if config.num_hidden_layers > len(layers):  # first, because a layer costs memory even without data
        raise ConfigError(f"{source.directory} has {len(layers)} of {config.num_hidden_layers} layers")
    wanted = places(empty_weights(config, "meta"), config)  # shapes without memory
    if faults := source.faults or _faults(wanted, source, config):
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        what = f"{source.directory} does not hold the weights of its configuration:"
        raise ConfigError("\n  ".join([what, *faults[:MAX_FAULTS], *more]))


def _faults(wanted: dict[str, Tensor], source: Source, config: ModelConfig) -> list[str]:
    """List what keeps a source from being loaded, one line for each tensor."""
    stored, faults = source.stored, []
    for name, place in wanted.items():
        if name not in stored:
            faults.append(f"{name} is missing: wanted {list(place.shape)}")
        elif stored[name].shape != tuple(place.shape):
            faults.append(f"{name} is misshapen: wanted {list(place.shape)}, found {list(stored[name].shape)}")
        elif stored[name].dtype not in (*READABLE, ENCODED):
            faults.append(f"{name} holds {stored[name].dtype}: readable are {', '.join(READABLE)}")
    for name, tensor in stored.items():
        tied_head = config.tie_word_embeddings and name == HEAD
        if name not in wanted and not tied_head and not name.endswith(HARMLESS):
            faults.append(f"{name} is unexpected: found {list(tensor.shape)}")
    if config.tie_word_embeddings and HEAD in stored and not faults:
        pairs = zip(source.chunks(HEAD), source.chunks(EMBEDDING), strict=False)
        same = stored[HEAD].shape == stored[EMBEDDING].shape and all(
            isinstance(head, Tensor) and isinstance(embedding, Tensor) and torch.equal(head, embedding)
            for head, embedding in pairs
        )
        if not same:
            faults.append(f"{HEAD} differs from {EMBEDDING}, and the configuration says tie_word_embeddings")
    return faults
