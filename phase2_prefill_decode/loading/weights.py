"""Weights: the tensors of a model, as its decoder uses them. Matrices with the same input are fused into one:

    qkv_proj      [(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size]   q, then k, then v
    gate_up_proj  [2 * intermediate_size, hidden_size]                                        gate, then up

A checkpoint has them apart. Each of its tensors is copied directly into its rows of the fused matrix. It is read some
rows at a time, so that the files are never in memory beside the model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.checks import ConfigError
from phase0_request.extras.gguf_file import is_gguf, read_header
from phase2_prefill_decode.extras.gguf.gguf import GGUFCheckpoint
from phase2_prefill_decode.extras.parallel.shard import Shard, ShardedCheckpoint
from phase2_prefill_decode.extras.quantized.checkpoint import QuantizedCheckpoint
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.weight import Matrix, QuantizedWeight, Stream, joins
from phase2_prefill_decode.loading.checkpoint import QUANTIZED, Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig

READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # plain numbers; other formats need a scale
HARMLESS = ("rotary_emb.inv_freq",)  # saved by earlier versions of transformers, and not needed
MAX_FAULTS = 20  # that one error lists
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

AnyCheckpoint = Checkpoint | QuantizedCheckpoint | GGUFCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer. A bias or a norm that the model does not have is None."""

    input_layernorm: Tensor  # [hidden_size]
    qkv_proj: Matrix
    qkv_proj_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    o_proj: Matrix  # [hidden_size, num_attention_heads * head_dim]
    o_proj_bias: Tensor | None = None
    post_attention_layernorm: Tensor  # [hidden_size]
    gate_up_proj: Matrix
    gate_up_proj_bias: Tensor | None = None
    down_proj: Matrix  # [hidden_size, intermediate_size]
    down_proj_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a whole model, as its decoder uses them."""

    embed_tokens: Tensor | QuantizedWeight | Stream  # [vocab_size, hidden_size]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden_size]
    lm_head: Matrix  # [vocab_size, hidden_size]; of a tied model, embed_tokens itself


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    *,
    scheme: str | None = None,
    quantize_embeddings: bool = False,
    progress: bool = False,
    layer_by_layer: bool = False,
    shard: Shard | None = None,
) -> Weights:
    """Load from a directory in Hugging Face layout or from a GGUF file, in the dtype of the configuration.

    Missing, unexpected or misshapen tensors raise one ConfigError that lists them, before memory is allocated. With a
    `scheme` such as int8 the matrices of the layers are quantized, with `quantize_embeddings` all. `progress` shows a
    bar on a terminal. `layer_by_layer` reads a layer when it is taken, and on a CPU a matrix when it is packed. Of a
    `shard`, only its part is read.
    """
    checkpoint = open_checkpoint(directory, config)
    _check(checkpoint, config)
    if scheme is not None and any(stored.dtype == QUANTIZED for stored in checkpoint.stored.values()):
        raise ConfigError(f"{checkpoint.directory} is quantized already; quantization={scheme} is for other models")
    hidden = None if progress else True  # None: unless the error stream is a terminal
    held = checkpoint if shard is None else ShardedCheckpoint(checkpoint, checkpoint.stored, shard)
    loader = _Loader(held, config, device, scheme, layer_by_layer and torch.device(device).type == "cpu")
    ends = replace(loader, scheme=scheme if quantize_embeddings else None)
    tied = config.tie_word_embeddings
    table = replace(ends, streamed=ends.streamed and tied)  # what is looked up only is not packed
    embed_tokens = table.matrix(EMBEDDING)
    lm_head = embed_tokens if tied else ends.matrix(HEAD)
    norm = loader.vector(NORM)
    assert not isinstance(embed_tokens, tuple)  # its rows are of one kind
    numbers = tqdm(range(config.num_hidden_layers), "Loading weights", unit="layer", leave=False, disable=hidden)
    layers = map(loader.layer, numbers)
    return Weights(embed_tokens, layers if layer_by_layer else tuple(layers), norm, lm_head)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the tensors of a checkpoint as the decoder uses them."""

    checkpoint: AnyCheckpoint | ShardedCheckpoint
    config: ModelConfig
    device: str | torch.device
    scheme: str | None  # to quantize with
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
        (stream,) = replace(self, scheme=None).streams(names)
        vector = stream.whole(self.device)
        assert isinstance(vector, Tensor)  # nothing quantizes one
        return vector

    def matrix(self, *names: str) -> Matrix:
        """The rows of all these in one matrix. Where one is quantized in another way than its neighbour, they stay
        several."""
        streams = self.streams(names)
        matrices = tuple(streams) if self.streamed else tuple(stream.whole(self.device) for stream in streams)
        return matrices[0] if len(matrices) == 1 else matrices

    def streams(self, names: Iterable[str]) -> list[Stream]:
        groups: list[list[Iterator[Tensor | QuantizedWeight]]] = []
        rows: list[int] = []
        last: Tensor | QuantizedWeight | None = None
        for name in names:
            chunks = self.chunks(name)
            first = next(chunks)
            if last is None or not joins(last, first):
                groups.append([])
                rows.append(0)
            groups[-1].append(chain([first], chunks))
            rows[-1] += self.checkpoint.stored[name].shape[0]
            last = first
        return [
            Stream(count, chain.from_iterable(group), self.dtype) for count, group in zip(rows, groups, strict=True)
        ]

    def chunks(self, name: str) -> Iterator[Tensor | QuantizedWeight]:
        for rows in self.checkpoint.chunks(name):
            if self.scheme is None or isinstance(rows, QuantizedWeight):
                yield rows
            else:
                yield quantize(rows.to(self.device, self.dtype), self.scheme)


def open_checkpoint(directory: str | Path, config: ModelConfig) -> AnyCheckpoint:
    if is_gguf(directory):
        return GGUFCheckpoint(read_header(directory))
    checkpoint = Checkpoint(directory)
    return checkpoint if config.quantization is None else QuantizedCheckpoint(checkpoint, config.quantization)


def random_weights(config: ModelConfig, device: str | torch.device = "cpu", seed: int = 0) -> Weights:
    """Random weights: norms of one, the rest normal with a standard deviation of 0.02, as at the start of training.
    Drawn on the device and in the configuration's dtype; for one seed these decide the numbers."""
    weights = empty_weights(config, device)
    draw = torch.Generator(weights.norm.device).manual_seed(seed)
    for name, place in places(weights, config).items():
        if "norm" in name:
            place.fill_(1)
        else:
            place.normal_(0, 0.02, generator=draw)
    return weights


def empty_weights(config: ModelConfig, device: str | torch.device) -> Weights:
    """Allocate weights without setting their values; on the device `meta` they have shapes and no memory."""
    dtype = getattr(torch, config.dtype)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        tensors = {}
        for name, (modules, inputs, bias) in config.layer.items():
            rows = sum(modules.values())
            tensors[name] = empty(rows, inputs) if inputs else empty(rows)
            if bias:
                tensors[f"{name}_bias"] = empty(rows)
        return LayerWeights(**tensors)

    embed_tokens = empty(config.vocab_size, config.hidden_size)
    lm_head = embed_tokens if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size)
    layers = tuple(layer() for _ in range(config.num_hidden_layers))
    return Weights(embed_tokens, layers, empty(config.hidden_size), lm_head)


def places(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names there, in weights that are not quantized: a tensor, or rows of a
    fused one."""
    tensors: dict[str, Any] = {EMBEDDING: weights.embed_tokens}
    for number, layer in enumerate(weights.layers):
        for field, (modules, _, _) in config.layer.items():
            for kind, tensor in (("weight", getattr(layer, field)), ("bias", getattr(layer, f"{field}_bias", None))):
                if tensor is not None:
                    names = [f"model.layers.{number}.{module}.{kind}" for module in modules]
                    tensors |= zip(names, tensor.split(list(modules.values())), strict=True)
    tensors[NORM] = weights.norm
    return tensors if config.tie_word_embeddings else tensors | {HEAD: weights.lm_head}


def _check(checkpoint: AnyCheckpoint, config: ModelConfig) -> None:
    """ConfigError if a checkpoint does not hold the tensors of a configuration, and no others."""
    layers = {name.split(".")[2] for name in checkpoint.stored if name.startswith("model.layers.")}
    if config.num_hidden_layers > len(layers):  # first, because a layer costs memory even without data
        raise ConfigError(f"{checkpoint.directory} has {len(layers)} of {config.num_hidden_layers} layers")
    wanted = places(empty_weights(config, "meta"), config)  # shapes without memory
    if faults := checkpoint.faults or _faults(wanted, checkpoint, config):
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        what = f"{checkpoint.directory} does not hold the weights of its configuration:"
        raise ConfigError("\n  ".join([what, *faults[:MAX_FAULTS], *more]))


def _faults(wanted: dict[str, Tensor], checkpoint: AnyCheckpoint, config: ModelConfig) -> list[str]:
    """List what keeps a checkpoint from being loaded, one line for each tensor."""
    stored, faults = checkpoint.stored, []
    for name, place in wanted.items():
        if name not in stored:
            faults.append(f"{name} is missing: wanted {list(place.shape)}")
        elif stored[name].shape != tuple(place.shape):
            faults.append(f"{name} is misshapen: wanted {list(place.shape)}, found {list(stored[name].shape)}")
        elif stored[name].dtype not in (*READABLE, QUANTIZED):
            faults.append(f"{name} holds {stored[name].dtype}: readable are {', '.join(READABLE)}")
    for name, tensor in stored.items():
        tied_head = config.tie_word_embeddings and name == HEAD
        if name not in wanted and not tied_head and not name.endswith(HARMLESS):
            faults.append(f"{name} is unexpected: found {list(tensor.shape)}")
    if config.tie_word_embeddings and HEAD in stored and not faults:
        pairs = zip(checkpoint.chunks(HEAD), checkpoint.chunks(EMBEDDING), strict=False)
        same = stored[HEAD].shape == stored[EMBEDDING].shape and all(
            isinstance(head, Tensor) and isinstance(embedding, Tensor) and torch.equal(head, embedding)
            for head, embedding in pairs
        )
        if not same:
            faults.append(f"{HEAD} differs from {EMBEDDING}, and the configuration says tie_word_embeddings")
    return faults
