"""GGUFCheckpoint: the tensors of a GGUF file, by the names that transformers gives them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from phase0_request.extras.gguf_file import GGUFHeader, GGUFTensor, read_header
from phase2_prefill_decode.extras.families.layer import MAX_EXPERTS
from phase2_prefill_decode.extras.families.sources import translated
from phase2_prefill_decode.extras.gguf.gguf_config import FACTORS, ROPE_FACTORS
from phase2_prefill_decode.extras.quantized.ggml import BLOCKS, FLOATS, OTHERS, READABLE
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.loading.checkpoint import ENCODED, Source, Stored, mapped
from phase2_prefill_decode.loading.config import ModelConfig

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj", "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
OWN = {  # of an architecture, where a name stands for another module
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}  # fmt: skip
TURNED = "llama", "granite", "smollm3"  # whose converter reorders the rows of q and k
_NAME = re.compile(r"(?:(blk)\.(\d+)\.)?(\w+)\.(weight|bias)")
_TURNED = re.compile(r".*\.(q|k)_proj\.(weight|bias)")


class GGUFCheckpoint:
    """Like a Checkpoint, for a GGUF file. Quantized tensors stay quantized."""

    def __init__(self, header: GGUFHeader) -> None:
        self.directory = header.file
        self.faults: list[str] = []
        self.stored: dict[str, Stored] = {}
        self._header = header
        self._tensors: dict[str, GGUFTensor] = {}
        size, names = header.file.stat().st_size, NAMES | OWN.get(self._kind, {})
        for name, tensor in header.tensors.items():
            known = _transformers_name(name, names)
            fault = _fault(tensor, size)
            if fault is not None:
                self.faults.append(f"{name} {list(tensor.shape)} {fault}")
            self._tensors |= {known: tensor} if fault else _apart(known, tensor)
        for known, tensor in self._tensors.items():
            if known not in (ROPE_FACTORS, *FACTORS.values()):
                dtype = FLOATS[tensor.kind][0] if tensor.kind in FLOATS else ENCODED
                self.stored[known] = Stored(header.file, tensor.shape, dtype, tensor.start)

    def nbytes(self, config: ModelConfig) -> int | None:
        """None if some tensors are quantized: their blocks are of several sizes."""
        return None if any(stored.dtype == ENCODED for stored in self.stored.values()) else config.bytes

    def chunks(self, name: str) -> Iterator[Tensor | QuantizedWeight]:
        """The rows of a tensor, some at a time; all rows of q and k at once, if they must be reordered."""
        tensor, heads = self._tensors[name], self._reordered_heads(name)
        count, row = tensor.shape[0], _nbytes(tensor) // tensor.shape[0]
        step = count if heads else self.stored[name].chunk
        for first in range(0, count, step):
            rows = mapped(self.directory, tensor.start + first * row, min(step, count - first) * row).view(-1, row)
            if heads:
                rows = rows.view(heads, -1, 2, row).transpose(1, 2).reshape(rows.shape)
            if tensor.kind in FLOATS:
                yield rows.view(FLOATS[tensor.kind][1]).view(-1, *tensor.shape[1:])
            else:
                block = BLOCKS[tensor.kind]
                yield block.read(rows.view(len(rows), -1, block.bytes))

    @property
    def _kind(self) -> str:
        return str(self._header.metadata.get("general.architecture"))

    def _reordered_heads(self, name: str) -> int | None:
        """llama.cpp rotates neighbouring numbers of a head where transformers rotates its halves, so its converter
        has reordered the rows of each head of q and k, of some families."""
        found = _TURNED.fullmatch(name)
        if found is None or self._kind not in TURNED:
            return None
        heads: int = self._header.metadata[f"{self._kind}.attention.head_count"]
        return heads if found[1] == "q" else self._header.metadata.get(f"{self._kind}.attention.head_count_kv", heads)


def open_file(file: Path, config: ModelConfig) -> Source:
    return translated(GGUFCheckpoint(read_header(file)), config)


def _transformers_name(name: str, names: Mapping[str, str]) -> str:
    found = _NAME.fullmatch(name)
    if found is None or found[3] not in names:
        return name
    layer = f"model.layers.{found[2]}." if found[1] else ""
    return f"{layer}{names[found[3]]}.{found[4]}"


def _apart(known: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """The matrices of a tensor that has those of all experts: [experts, out, in]."""
    if "{}" not in known or len(tensor.shape) < 2 or tensor.shape[0] > MAX_EXPERTS:
        return {known: tensor}
    one = tensor._replace(shape=tensor.shape[1:])
    starts = range(tensor.start, tensor.start + _nbytes(tensor), _nbytes(one))
    return {known.format(expert): one._replace(start=start) for expert, start in enumerate(starts)}


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
    if tensor.kind in BLOCKS and (len(tensor.shape) not in (2, 3) or tensor.shape[-1] % BLOCKS[tensor.kind].numbers):
        return f"is no matrix of whole blocks of {BLOCKS[tensor.kind].numbers}"
    if tensor.start + _nbytes(tensor) > size:
        return "reaches beyond the end of the file, which was not copied whole"
    return None
