"""GGUFCheckpoint: the tensors of a GGUF file, by the names that transformers gives them."""

import re
from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from phase0_request.gguf_file import GGUFHeader, GGUFTensor
from phase2_prefill_decode.loading.checkpoint import QUANTIZED, Stored
from phase2_prefill_decode.loading.gguf_config import ROPE_FACTORS
from phase2_prefill_decode.loading.quantized.ggml import BLOCKS, FLOATS, OTHERS, READABLE
from phase2_prefill_decode.loading.quantized.weight import QuantizedWeight, joined

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
AT_ONCE = 1 << 17  # numbers that are read: what they are made of stays small
_NAME = re.compile(r"(?:(blk)\.(\d+)\.)?(\w+)\.(weight|bias)")
_TURNED = re.compile(r".*\.(q|k)_proj\.(weight|bias)")


class GGUFCheckpoint:
    """Like a Checkpoint. Quantized tensors are read as such."""

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
                rows = self._turned(name, content.view(tensor.shape[0], -1, block.bytes))
                step = max(AT_ONCE // tensor.shape[1], 1)
                yield name, joined([block.read(some) for some in torch.split(rows, step)])

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
