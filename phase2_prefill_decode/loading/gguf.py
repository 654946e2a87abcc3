"""A GGUF file as a model: its metadata as a config.json, its tensors as a checkpoint, both by transformers' names."""

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phase0_request.checks import ConfigError, check_choice
from phase0_request.gguf_file import GGUFHeader, GGUFTensor
from phase2_prefill_decode.loading.checkpoint import QUANTIZED, Stored
from phase2_prefill_decode.loading.quantized.ggml import BLOCKS, FLOATS, OTHERS, READABLE
from phase2_prefill_decode.loading.quantized.weight import QuantizedWeight

ARCHITECTURES = "llama", "qwen2", "qwen3"  # Mistral's models are llama
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:(blk)\.(\d+)\.)?(\w+)\.(weight|bias)")
_TURNED = re.compile(r".*\.(q|k)_proj\.(weight|bias)")


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """What a config.json of this model says."""
    tensors, kind = header.tensors, str(header.metadata.get("general.architecture"))
    check_choice(f"{header.file}: general.architecture", kind, ARCHITECTURES)

    def get(name: str, default: float | None = None) -> Any:
        return header.get(f"{kind}.{name}", (int, float), default)

    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{header.file} lacks token_embd.weight")
    heads, size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", size // heads if isinstance(heads, int) and heads else 0)
    unlike = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for name, only in unlike.items():
        if get(name, only) != only:
            raise ConfigError(f"{header.file}: {kind}.{name} is {get(name)}; supported is {only}")
    context = get("context_length")
    if 0 < get("attention.sliding_window", 0) < context:
        raise ConfigError(f"{header.file}: {kind}.attention.sliding_window is not supported")
    return {
        "model_type": kind,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, kind, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(header.eos_ids),
        "dtype": _dtype(header),
    }


def _rope(header: GGUFHeader, kind: str, head_dim: int) -> dict[str, Any]:
    prefix = f"{kind}.rope.scaling"
    rope: dict[str, Any] = {"rope_theta": header.get(f"{kind}.rope.freq_base", (int, float), 10_000.0)}
    scaling = header.metadata.get(f"{prefix}.type", "none")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": header.metadata.get(f"{prefix}.factor")}
        rope["original_max_position_embeddings"] = header.metadata.get(f"{prefix}.original_context_length")
    if ROPE_FACTORS not in header.tensors:
        return rope
    # Llama 3 has a factor for each pair, computed from one. The other constants are those of all its versions.
    checkpoint = GGUFCheckpoint(header)
    if checkpoint.faults:
        raise ConfigError(f"{header.file}: {checkpoint.faults[0]}")
    factors = next(tensor for _, tensor in checkpoint.read([ROPE_FACTORS]) if isinstance(tensor, Tensor))
    llama3 = {
        "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    powers = rope["rope_theta"] ** (torch.arange(0, head_dim, 2).double() / head_dim)
    kept = ((8192 / (2 * math.pi * powers) - 1) / 3).clamp(0, 1)
    wanted = 1 / (kept + (1 - kept) / llama3["factor"])
    if factors.shape != wanted.shape or not torch.allclose(factors.double(), wanted, rtol=1e-4):
        raise ConfigError(f"{header.file}: {ROPE_FACTORS} is not that of Llama 3, and no other is supported")
    return rope | llama3


def _dtype(header: GGUFHeader) -> str:
    """The dtype to compute in: that of the matrices, if all are of one."""
    kinds = {tensor.kind for name, tensor in header.tensors.items() if len(tensor.shape) > 1}
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")


class GGUFCheckpoint:
    """The tensors of a GGUF file, by the names that transformers gives them. Quantized ones are read as such."""

    def __init__(self, header: GGUFHeader) -> None:
        self.directory = header.file
        self.faults: list[str] = []
        self.stored: dict[str, Stored] = {}
        self._header = header
        self._tensors: dict[str, GGUFTensor] = {}
        size = header.file.stat().st_size
        for name, tensor in header.tensors.items():
            known = _transformers_name(name)
            if fault := _fault(tensor, size):
                self.faults.append(f"{name} {list(tensor.shape)} {fault}")
            self._tensors[known] = tensor
            if name != ROPE_FACTORS:
                dtype = FLOATS[tensor.kind][0] if tensor.kind in FLOATS else QUANTIZED
                self.stored[known] = Stored(header.file, tensor.shape, dtype)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
        """Read these tensors: views of the mapped file, except for the quantized ones."""
        for name in names:
            tensor = self._tensors[name]
            content = torch.from_numpy(np.memmap(self.directory, np.uint8, "c", tensor.start, (_nbytes(tensor),)))
            if tensor.kind in FLOATS:
                yield name, self._turned(name, content.view(FLOATS[tensor.kind][1]).view(tensor.shape))
            else:
                block = BLOCKS[tensor.kind]
                yield name, block.read(self._turned(name, content.view(tensor.shape[0], -1, block.bytes)))

    def _turned(self, name: str, rows: Tensor) -> Tensor:
        """llama.cpp rotates neighbours of a head where transformers rotates its halves, so its converter has reordered
        the rows of q and k. Here they get their order back. Qwen's are as transformers has them."""
        found = _TURNED.fullmatch(name)
        if found is None or self._header.metadata["general.architecture"] != "llama":
            return rows
        heads = self._header.metadata["llama.attention.head_count"]
        heads = heads if found[1] == "q" else self._header.metadata.get("llama.attention.head_count_kv", heads)
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _transformers_name(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None or found[3] not in NAMES:
        return name
    layer = f"model.layers.{found[2]}." if found[1] else ""
    return f"{layer}{NAMES[found[3]]}.{found[4]}"


def _nbytes(tensor: GGUFTensor) -> int:
    if tensor.kind in FLOATS:
        return tensor.numel * FLOATS[tensor.kind][1].itemsize
    block = BLOCKS[tensor.kind]
    return tensor.numel // block.numbers * block.bytes


def _fault(tensor: GGUFTensor, size: int) -> str | None:
    """Why a tensor cannot be read from a file of this size."""
    if tensor.kind not in FLOATS and tensor.kind not in BLOCKS:
        return f"is of type {OTHERS.get(tensor.kind, tensor.kind)}: readable are {READABLE}"
    if not tensor.shape or tensor.numel < 1:
        return "is empty"
    if tensor.kind in BLOCKS and (len(tensor.shape) != 2 or tensor.shape[1] % BLOCKS[tensor.kind].numbers):
        return f"is no matrix of whole blocks of {BLOCKS[tensor.kind].numbers}"
    if tensor.start + _nbytes(tensor) > size:
        return "reaches beyond the end of the file, which was not copied whole"
    return None
