"""Weights: the tensors of a model, as its decoder uses them. Matrices with the same input are fused into one:

    qkv_proj      [(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size]   q, then k, then v
    gate_up_proj  [2 * intermediate_size, hidden_size]                                        gate, then up

A checkpoint has them apart. Each of its tensors is copied directly into its rows of the fused matrix.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.checks import ConfigError
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig

READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # plain numbers; other formats need a scale
HARMLESS = ("rotary_emb.inv_freq",)  # saved by earlier versions of transformers, and not needed
MAX_FAULTS = 20  # that one error lists
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer. A bias or a norm that the model does not have is None."""

    input_layernorm: Tensor  # [hidden_size]
    qkv_proj: Tensor
    qkv_proj_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    o_proj: Tensor  # [hidden_size, num_attention_heads * head_dim]
    o_proj_bias: Tensor | None = None
    post_attention_layernorm: Tensor  # [hidden_size]
    gate_up_proj: Tensor
    gate_up_proj_bias: Tensor | None = None
    down_proj: Tensor  # [hidden_size, intermediate_size]
    down_proj_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a whole model, as its decoder uses them."""

    embed_tokens: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden_size]
    lm_head: Tensor  # [vocab_size, hidden_size]; of a tied model, embed_tokens itself


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    *,
    progress: bool = False,
) -> Weights:
    """Load from a directory in Hugging Face layout, in the dtype of the configuration.

    Missing, unexpected or misshapen tensors raise one ConfigError that lists them, before memory is allocated.
    `progress` shows a bar on a terminal.
    """
    checkpoint = Checkpoint(directory)
    layers = {name.split(".")[2] for name in checkpoint.stored if name.startswith("model.layers.")}
    if config.num_hidden_layers > len(layers):  # first, because a layer costs memory even without data
        raise ConfigError(f"{checkpoint.directory} has {len(layers)} of {config.num_hidden_layers} layers")
    wanted = places(empty_weights(config, "meta"), config)  # shapes without memory
    if faults := _faults(wanted, checkpoint, config):
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        what = f"{checkpoint.directory} does not hold the weights of its configuration:"
        raise ConfigError("\n  ".join([what, *faults[:MAX_FAULTS], *more]))
    weights = empty_weights(config, device)
    into = places(weights, config)
    total = sum(place.nbytes for place in into.values())
    hidden = None if progress else True  # None: unless the error stream is a terminal
    with tqdm(desc="Loading weights", total=total, unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
        for name, tensor in checkpoint.read(into):
            into[name].copy_(tensor)
            bar.update(into[name].nbytes)
    return weights


def random_weights(config: ModelConfig, device: str | torch.device = "cpu", seed: int = 0) -> Weights:
    """Random weights: norms of one, the rest normal with a standard deviation of 0.02, as at the start of training.
    Drawn on the device and in the configuration's dtype; for one seed these decide the numbers."""
    weights = empty_weights(config, device)
    draw = torch.Generator(weights.embed_tokens.device).manual_seed(seed)
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
    """Where each tensor of a checkpoint is copied to, by its name there: a whole tensor, or rows of a fused one."""
    tensors = {EMBEDDING: weights.embed_tokens}
    for number, layer in enumerate(weights.layers):
        for field, (modules, _, _) in config.layer.items():
            for kind, tensor in (("weight", getattr(layer, field)), ("bias", getattr(layer, f"{field}_bias", None))):
                if tensor is not None:
                    names = [f"model.layers.{number}.{module}.{kind}" for module in modules]
                    tensors |= zip(names, tensor.split(list(modules.values())), strict=True)
    tensors["model.norm.weight"] = weights.norm
    return tensors if config.tie_word_embeddings else tensors | {HEAD: weights.lm_head}


def _faults(wanted: dict[str, Tensor], checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """List what keeps a checkpoint from being loaded, one line for each tensor."""
    stored, faults = checkpoint.stored, []
    for name, place in wanted.items():
        if name not in stored:
            faults.append(f"{name} is missing: wanted {list(place.shape)}")
        elif stored[name].shape != tuple(place.shape):
            faults.append(f"{name} is misshapen: wanted {list(place.shape)}, found {list(stored[name].shape)}")
        elif stored[name].dtype not in READABLE:
            faults.append(f"{name} holds {stored[name].dtype}: readable are {', '.join(READABLE)}")
    for name, tensor in stored.items():
        tied_head = config.tie_word_embeddings and name == HEAD
        if name not in wanted and not tied_head and not name.endswith(HARMLESS):
            faults.append(f"{name} is unexpected: found {list(tensor.shape)}")
    if config.tie_word_embeddings and HEAD in stored and not faults:
        head, embedding = (dict(checkpoint.read([HEAD, EMBEDDING]))[name] for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            faults.append(f"{HEAD} differs from {EMBEDDING}, and the configuration says tie_word_embeddings")
    return faults
