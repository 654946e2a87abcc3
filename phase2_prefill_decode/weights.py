"""Weights: the tensors of a model as its decoder wants them. What is multiplied with the same input is one matrix here:

    qkv      [(n_head + 2 * n_kv_head) * head_dim, n_embd]   q, then k, then v
    gate_up  [2 * n_inner, n_embd]                           gate, then up

A checkpoint has them apart. Each of its tensors is copied straight to the rows it becomes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from phase2_prefill_decode.checkpoint import Checkpoint, InMemory, WeightsError, listed
from phase2_prefill_decode.config import ModelConfig

READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # numbers as they are; others need a scale to mean one
HARMLESS = ("rotary_emb.inv_freq",)  # computed from the configuration, but saved all the same by earlier transformers
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. A bias or a norm that the model does not have is None."""

    input_norm: Tensor  # [n_embd]
    qkv: Tensor  # [(n_head + 2 * n_kv_head) * head_dim, n_embd]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [n_embd, n_head * head_dim]
    out_bias: Tensor | None
    post_norm: Tensor  # [n_embd]
    gate_up: Tensor  # [2 * n_inner, n_embd]
    gate_up_bias: Tensor | None
    down: Tensor  # [n_embd, n_inner]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model."""

    embedding: Tensor  # [vocab_size, n_embd]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [n_embd]
    head: Tensor  # [vocab_size, n_embd]; of a tied model the embedding itself


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    progress: bool = False,
) -> Weights:
    """From a directory in Hugging Face layout, in `dtype` or as the configuration says.

    Tensors that are missing, unexpected or of another shape are one WeightsError, which lists them all. With
    `progress` a terminal shows how far it has come.
    """
    return _fill(Checkpoint(directory), config, device, dtype, progress)


def weights_from(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Weights:
    """From a checkpoint's tensors by name, as `load_weights` takes them from files."""
    return _fill(InMemory(tensors), config, device, dtype, progress=False)


def _fill(
    checkpoint: Checkpoint | InMemory,
    config: ModelConfig,
    device: str | torch.device,
    dtype: torch.dtype | None,
    progress: bool,
) -> Weights:
    wanted = places(empty_weights(config, "meta", dtype), config)  # shapes without memory
    faults = _faults(wanted, checkpoint, config)
    if faults:
        raise WeightsError(
            listed(f"{checkpoint.directory} does not hold the weights that its configuration asks for", faults)
        )
    weights = empty_weights(config, device, dtype)
    into = places(weights, config)
    total = sum(place.nbytes for place in into.values())
    hidden = None if progress else True  # None: unless the error stream is a terminal
    with tqdm(desc="Loading weights", total=total, unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
        for name, tensor in checkpoint.read(into):
            into[name].copy_(tensor)
            bar.update(into[name].nbytes)
    return weights


def random_weights(
    config: ModelConfig, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, seed: int = 0
) -> Weights:
    """Of a model that has learned nothing: norms of one, the rest normal with the 0.02 that training starts from. Made
    where they stay, in the dtype they have. A seed gives the same numbers on the same device and in the same dtype."""
    weights = empty_weights(config, device, dtype)
    draw = torch.Generator(weights.embedding.device).manual_seed(seed)
    for name, place in places(weights, config).items():
        if "norm" in name:
            place.fill_(1)
        else:
            place.normal_(0, 0.02, generator=draw)
    return weights


def empty_weights(config: ModelConfig, device: str | torch.device, dtype: torch.dtype | None = None) -> Weights:
    """Room for them, with nothing in it."""
    c, dtype = config, dtype or getattr(torch, config.dtype)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def room_if(there: bool, size: int) -> Tensor | None:
        return room(size) if there else None

    q, qkv = c.n_head * c.head_dim, (c.n_head + 2 * c.n_kv_head) * c.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=room(c.n_embd),
            qkv=room(qkv, c.n_embd),
            qkv_bias=room_if(c.qkv_bias, qkv),
            q_norm=room_if(c.qk_norm, c.head_dim),
            k_norm=room_if(c.qk_norm, c.head_dim),
            out=room(c.n_embd, q),
            out_bias=room_if(c.out_bias, c.n_embd),
            post_norm=room(c.n_embd),
            gate_up=room(2 * c.n_inner, c.n_embd),
            gate_up_bias=room_if(c.mlp_bias, 2 * c.n_inner),
            down=room(c.n_embd, c.n_inner),
            down_bias=room_if(c.mlp_bias, c.n_embd),
        )
        for _ in range(c.n_layer)
    )
    embedding = room(c.vocab_size, c.n_embd)
    return Weights(embedding, layers, room(c.n_embd), embedding if c.tied else room(c.vocab_size, c.n_embd))


# region places
def places(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes, by the name that it has there: a whole tensor, or rows of a fused one."""
    c, q, kv = config, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    rows = {
        "input_norm": {"input_layernorm": c.n_embd},
        "qkv": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
        "q_norm": {"self_attn.q_norm": c.head_dim},
        "k_norm": {"self_attn.k_norm": c.head_dim},
        "out": {"self_attn.o_proj": c.n_embd},
        "post_norm": {"post_attention_layernorm": c.n_embd},
        "gate_up": {"mlp.gate_proj": c.n_inner, "mlp.up_proj": c.n_inner},
        "down": {"mlp.down_proj": c.n_embd},
    }
    found = {EMBEDDING: weights.embedding}
    for number, layer in enumerate(weights.layers):
        for field, parts in rows.items():
            for kind, tensor in (("weight", getattr(layer, field)), ("bias", getattr(layer, f"{field}_bias", None))):
                if tensor is not None:
                    names = [f"model.layers.{number}.{part}.{kind}" for part in parts]
                    found |= zip(names, tensor.split(list(parts.values())), strict=True)
    found["model.norm.weight"] = weights.norm
    return found if c.tied else found | {HEAD: weights.head}


# endregion


def _faults(wanted: dict[str, Tensor], checkpoint: Checkpoint | InMemory, config: ModelConfig) -> list[str]:
    """All that is wrong with a checkpoint, a line for each tensor."""
    stored, faults = checkpoint.stored, []
    for name, place in wanted.items():
        if name not in stored:
            faults.append(f"{name} is missing: wanted {list(place.shape)}")
        elif stored[name].shape != tuple(place.shape):
            faults.append(f"{name} is misshapen: wanted {list(place.shape)}, found {list(stored[name].shape)}")
        elif stored[name].dtype not in READABLE:
            faults.append(f"{name} holds {stored[name].dtype}: readable are {', '.join(READABLE)}")
    for name, tensor in stored.items():
        tied_head = config.tied and name == HEAD
        if name not in wanted and not tied_head and not name.endswith(HARMLESS):
            faults.append(f"{name} is unexpected: found {list(tensor.shape)}")
    if config.tied and HEAD in stored and not faults:
        head, embedding = (dict(checkpoint.read([HEAD, EMBEDDING]))[name] for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            faults.append(f"{HEAD} differs from {EMBEDDING}, and the configuration says that they are one")
    return faults
