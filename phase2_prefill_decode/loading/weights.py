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

from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.matrix import Matrix, Rows, Stream

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


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

    embed_tokens: Rows | Stream  # [vocab_size, hidden_size]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden_size]
    lm_head: Matrix  # [vocab_size, hidden_size]; of a tied model, embed_tokens itself


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
    """The tensors of a checkpoint, by their names there, in weights that are plain numbers: a tensor, or rows of a
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
