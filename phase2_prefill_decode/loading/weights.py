"""Weights: the tensors of a model, as its decoder uses them. Matrices with the same input are fused into one:

    qkv_proj      [(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size]   q, then k, then v
    gate_up_proj  [2 * intermediate_size, hidden_size]                                        gate, then up

A checkpoint has them apart: `places` says where.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.support.checks import ConfigError
from phase0_request.support.memory import free_bytes
from phase2_prefill_decode.loading.checkpoint import ENCODED, Source
from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig

READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # plain numbers; other formats need a scale
HARMLESS = ("rotary_emb.inv_freq",)  # saved by earlier versions of transformers, and not needed
MAX_FAULTS = 20  # that one error lists
EMBED_TOKENS, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Matrix = Any  # a tensor, or another form for which a backend has a linear layer


# The tensors of one layer, by the names that its LayerConfig gives them; a bias as `qkv_proj_bias`. A bias or a norm
# that the layer lacks is not in it.
LayerWeights = dict[str, Matrix]


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a whole model, as its decoder uses them."""

    embed_tokens: Matrix  # [vocab_size, hidden_size]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden_size]
    lm_head: Matrix  # [vocab_size, hidden_size]; of a tied model, embed_tokens itself


def load_weights(
    source: Source, config: ModelConfig, device: str | torch.device = "cpu", *, progress: bool = False
) -> Weights:
    """Load the weights of a model in the dtype of its configuration. Each tensor is copied, some rows at a time,
    directly into its rows of a fused matrix. ConfigError if the source does not hold them, before memory is allocated.
    `progress` shows a bar on a terminal."""
    check_tensors(source, config)
    weights = empty_weights(config, device)
    hidden = None if progress else True  # None: unless the error stream is a terminal
    for name, place in tqdm(places(weights, config).items(), "Loading weights", leave=False, disable=hidden):
        stop = 0
        for rows in source.chunks(name):
            start, stop = stop, stop + len(rows)
            place[start:stop].copy_(rows)
    return weights


def random_weights(config: ModelConfig, device: str | torch.device = "cpu", seed: int = 0) -> Weights:
    """Random weights: norms of one, the rest normal with a standard deviation of 0.02, as at the start of training.
    Drawn on the device in the configuration's dtype; both change the numbers that a seed gives."""
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

    def layer(described: LayerConfig) -> LayerWeights:
        tensors = {}
        for name, (modules, inputs, bias) in described.tensors(config).items():
            rows = sum(modules.values())
            tensors[name] = empty(rows, inputs) if inputs else empty(rows)
            if bias:
                tensors[f"{name}_bias"] = empty(rows)
        return tensors

    embed_tokens = empty(config.vocab_size, config.hidden_size)
    lm_head = embed_tokens if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size)
    layers = tuple(map(layer, config.layers))
    return Weights(embed_tokens, layers, empty(config.hidden_size), lm_head)


def places(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names there, in weights that are plain numbers: a tensor, or rows of a
    fused one."""
    tensors: dict[str, Any] = {EMBED_TOKENS: weights.embed_tokens}
    for number, (described, layer) in enumerate(zip(config.layers, weights.layers, strict=True)):
        for field, (modules, _, _) in described.tensors(config).items():
            for kind, tensor in (("weight", layer[field]), ("bias", layer.get(f"{field}_bias"))):
                if tensor is not None:
                    names = [f"model.layers.{number}.{module}.{kind}" for module in modules]
                    tensors |= zip(names, tensor.split(list(modules.values())), strict=True)
    tensors[NORM] = weights.norm
    return tensors if config.tie_word_embeddings else tensors | {HEAD: weights.lm_head}


def check_tensors(source: Source, config: ModelConfig) -> None:
    """ConfigError unless a source holds exactly the tensors of a configuration."""
    layers = {name.split(".")[2] for name in source.stored if name.startswith("model.layers.")}
    if config.num_hidden_layers > len(layers):  # first, because a layer costs memory even without data
        raise ConfigError(f"{source.directory} has {len(layers)} of {config.num_hidden_layers} layers")
    wanted = places(empty_weights(config, "meta"), config)  # shapes without memory
    if faults := source.faults or _faults(wanted, source, config):
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        what = f"{source.directory} does not hold the weights of its configuration:"
        raise ConfigError("\n  ".join([what, *faults[:MAX_FAULTS], *more]))


def _faults(wanted: dict[str, Tensor], source: Source, config: ModelConfig) -> list[str]:
    """List the faults that keep a source from loading, one line per tensor."""
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
    if config.tie_word_embeddings and HEAD in stored and not faults and stored[HEAD].dtype != ENCODED:
        pairs = zip(source.chunks(HEAD), source.chunks(EMBED_TOKENS), strict=False)
        same = stored[HEAD].shape == stored[EMBED_TOKENS].shape and all(
            isinstance(head, Tensor) and isinstance(rows, Tensor) and torch.equal(head, rows) for head, rows in pairs
        )
        if not same:
            faults.append(f"{HEAD} differs from {EMBED_TOKENS}, and the configuration says tie_word_embeddings")
    return faults


def check_memory(size: int | None, device: torch.device, advice: str) -> None:
    """ConfigError if weights of this size are larger than the free memory."""
    free = free_bytes(device)
    if size is not None and free is not None and size > free:
        words = f"its weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free{advice}"
        raise ConfigError(f"the model does not fit: {words}")
