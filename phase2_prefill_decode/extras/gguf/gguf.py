"""GGUFCheckpoint: the tensors of a GGUF file, by the names that transformers gives them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from phase0_request.extras.gguf_file import GGUFHeader, GGUFTensor, read_header
from phase2_prefill_decode.extras.families.layer import MAX_EXPERTS
from phase2_prefill_decode.extras.families.sources import Translated, translated
from phase2_prefill_decode.extras.gguf.architectures import ARCHITECTURES, Architecture, ModelMetadata
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
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_NAME = re.compile(r"(?:blk\.(\d{1,9})\.)?([\w.]+?)(\.weight|\.bias)?")
_TURNED = re.compile(r".*\.(q|k)_proj\.(weight|bias)")


class GGUFCheckpoint:
    """Like a Checkpoint, for a GGUF file. Quantized tensors stay quantized."""

    def __init__(self, header: GGUFHeader) -> None:
        self.directory = header.file
        self.faults: list[str] = []
        self.stored: dict[str, Stored] = {}
        self._metadata = metadata = ModelMetadata(header, str(header.metadata.get("general.architecture")))
        self._architecture = ARCHITECTURES.get(metadata.kind, Architecture(metadata.kind))
        self._tensors: dict[str, GGUFTensor] = {}
        size, names = header.file.stat().st_size, {**NAMES, **self._architecture.names}
        for name, tensor in header.tensors.items():
            known = _transformers_name(name, names, metadata.drafting)
            if known is None:
                continue
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

    def _reordered_heads(self, name: str) -> int | None:
        """llama.cpp rotates neighbouring numbers of a head where transformers rotates its halves, so its converter
        has reordered the rows of each head of q and k, of some families."""
        found = _TURNED.fullmatch(name)
        if found is None or not self._architecture.turned:
            return None
        heads = self._metadata.count("attention.head_count")
        return heads if found[1] == "q" else self._metadata.count("attention.head_count_kv", heads)


def open_file(file: Path, config: ModelConfig) -> Source:
    return translated(Translated(GGUFCheckpoint(read_header(file)), _decays), config)


def _decays(name: str, rows: Any) -> Any:
    """A file has how much a state decays; transformers, the logarithm of it, without the sign."""
    return rows.neg().log() if name.endswith(".A_log") else rows


def _transformers_name(name: str, names: Mapping[str, str], drafting: range) -> str | None:
    """The name that transformers gives a tensor; None if it is of a layer that drafts tokens."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    layer, module, kind = found[1], found[2], found[3] or ""
    if layer and int(layer) in drafting:
        return None
    known = names.get(module + kind) or (f"{names[module]}{kind}" if module in names else None)
    return name if known is None else f"model.layers.{layer}.{known}" if layer else known


CONVOLUTIONS = ".conv.conv.weight", ".conv1d.weight"


def _apart(known: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """The matrices of a tensor that stacks all experts: [experts, out, in]. A convolution is a vector, as in a
    checkpoint, and a gate a matrix of one row."""
    if known.endswith(CONVOLUTIONS) and tensor.kind in FLOATS:
        return {known: tensor._replace(shape=(tensor.numel,))}
    if known.endswith(".shared_expert_gate.weight") and tensor.kind in FLOATS:
        return {known: tensor._replace(shape=(1, tensor.numel))}
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
