"""A checkpoint of gpt-oss has the tensors of all experts in one, with gate and up alternating. Here they are apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from phase2_prefill_decode.extras.quantized.mxfp4 import BLOCK, of_blocks
from phase2_prefill_decode.loading.checkpoint import ENCODED, Source, Stored
from phase2_prefill_decode.loading.config import ModelConfig

EXPERTS, SINKS = ".mlp.experts.", ".self_attn.sinks"
ROUTER = ".mlp.router.", ".mlp.gate."
GATED = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}  # rows of gate_up_proj
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of an expert is in the checkpoint."""

    name: str
    expert: int
    rows: slice
    inputs_first: bool  # it is transposed


class OssSource:
    """Each tensor of an expert under a name of its own, such as mlp.experts.3.gate_proj.weight."""

    def __init__(self, source: Source) -> None:
        self.directory = source.directory
        self.stored: dict[str, Stored] = {}
        self._source = source
        self._names: dict[str, str] = {}  # in the checkpoint
        self._places: dict[str, Place] = {}
        faults = list(source.faults)
        for name, stored in source.stored.items():
            if EXPERTS not in name:
                own = f"{name}.weight" if name.endswith(SINKS) else name.replace(*ROUTER)
                self.stored[own], self._names[own] = stored, name
            elif name.endswith(BLOCKS) and not _fits(stored, source.stored.get(scales_of(name))):
                faults.append(f"{name} and {scales_of(name)} do not fit: found {list(stored.shape)}")
            elif not name.endswith(SCALES) or f"{name.removesuffix(SCALES)}{BLOCKS}" not in source.stored:
                self._add(name, stored)
        self.faults: Sequence[str] = faults

    def _add(self, name: str, stored: Stored) -> None:
        """The tensors of each expert in a tensor of all."""
        prefix, _, tensor = name.partition(EXPERTS)
        module, kind = (tensor[:-5], "bias") if tensor.endswith("_bias") else (tensor.removesuffix(BLOCKS), "weight")
        count, *shape = stored.shape
        if inputs_first := kind == "weight" and len(shape) == 2:
            shape = shape[::-1]
        if name.endswith(BLOCKS):
            stored, shape = replace(stored, dtype=ENCODED), [shape[0], shape[1] * BLOCK]
        for part, rows in (GATED if module == "gate_up_proj" else {module: slice(None)}).items():
            own = replace(stored, shape=(len(range(*rows.indices(shape[0]))), *shape[1:]))
            for expert in range(count):
                place = f"{prefix}{EXPERTS}{expert}.{part}.{kind}"
                self.stored[place], self._places[place] = own, Place(name, expert, rows, inputs_first)

    def nbytes(self, config: ModelConfig) -> int | None:
        is_encoded = any(stored.dtype == ENCODED for stored in self.stored.values())
        return None if is_encoded else self._source.nbytes(config)

    def chunks(self, name: str) -> Iterator[Any]:
        place = self._places.get(name)
        if place is None:
            yield from self._source.chunks(self._names[name])
            return
        rows = self._rows(place.name, place)
        yield of_blocks(rows, self._rows(scales_of(place.name), place)) if place.name.endswith(BLOCKS) else rows

    def _rows(self, name: str, place: Place) -> Tensor:
        """The rows of a place. Chunks are mappings of the file: only these rows are read."""
        start = 0
        for experts in self._source.chunks(name):
            if place.expert < start + len(experts):
                break
            start += len(experts)
        rows: Tensor = experts[place.expert - start]
        return (rows.t() if place.inputs_first else rows)[place.rows]


def scales_of(blocks: str) -> str:
    return f"{blocks.removesuffix(BLOCKS)}{SCALES}"


def _fits(blocks: Stored, scales: Stored | None) -> bool:
    """Whether these are blocks of bytes with a scale each."""
    return (
        scales is not None
        and (blocks.dtype, scales.dtype) == ("U8", "U8")
        and blocks.shape == (*scales.shape, BLOCK // 2)
        and len(scales.shape) == 3
    )
