"""The tensors that a checkpoint stores in another form than the decoder reads."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product, starmap
from math import prod
from typing import Any

import torch
from torch import Tensor

from phase2_prefill_decode.extras.families import lfm, qwen
from phase2_prefill_decode.extras.families.oss_source import OssSource
from phase2_prefill_decode.extras.families.stateful import DeltaLayer, GatedLayer
from phase2_prefill_decode.loading.checkpoint import DTYPES, Checkpoint, Source, Stored
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import NORM

log = logging.getLogger(__name__)
DELTA = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"  # with Gated DeltaNet


class Translated:
    """A source with some of its tensors changed while they are read."""

    def __init__(self, source: Source, change: Callable[[str, Any], Any]) -> None:
        self.directory, self.faults, self.stored = source.directory, source.faults, source.stored
        self._source, self._change = source, change

    def nbytes(self, config: ModelConfig) -> int | None:
        return self._source.nbytes(config)

    def chunks(self, name: str) -> Iterator[Any]:
        return (self._change(name, rows) for rows in self._source.chunks(name))


class Renamed:
    """A source whose tensors have other names."""

    def __init__(self, source: Source, rename: Callable[[str], str]) -> None:
        self.directory, self.faults, self._source = source.directory, source.faults, source
        self._names = {rename(name): name for name in source.stored}
        self.stored = {new: source.stored[name] for new, name in self._names.items()}

    def nbytes(self, config: ModelConfig) -> int | None:
        return self._source.nbytes(config)

    def chunks(self, name: str) -> Iterator[Any]:
        return self._source.chunks(self._names[name])


class Gated(Translated):
    """A source that has the rows of queries and of gates apart. In the checkpoint, each head has both."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        super().__init__(source, lambda name, rows: rows)
        self._head_dim = config.head_dim
        self.stored: Mapping[str, Stored] = {
            own: replace(stored, shape=(stored.shape[0] // 2, *stored.shape[1:])) if ".q_proj." in name else stored
            for name, stored in source.stored.items()
            if not name.startswith("mtp.")  # layers that draft tokens
            for own in ((name, name.replace(".q_proj.", ".gate_proj.")) if ".q_proj." in name else (name,))
        }

    def chunks(self, name: str) -> Iterator[Any]:
        side = next((side for side, part in enumerate((".q_proj.", ".self_attn.gate_proj.")) if part in name), None)
        if side is None:
            yield from self._source.chunks(name)
            return
        rows = _whole(self._source.chunks(name.replace(".gate_proj.", ".q_proj.")))
        yield _picked(rows, torch.arange(len(rows)).view(-1, 2, self._head_dim)[:, side].flatten())


class Interleaved(Translated):
    """A source that has the projections of Gated DeltaNet apart. In a checkpoint of Qwen3-Next, each key head has its
    query, its key, its values and their gates side by side, and so its b and a."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        super().__init__(source, lambda name, rows: rows)
        self.stored: Mapping[str, Stored] = dict(source.stored)
        self._rows: dict[str, tuple[str, Tensor]] = {}  # of a part: its tensor in the checkpoint, and its rows there
        for number, layer in enumerate(config.layers):
            if isinstance(layer, DeltaLayer):
                own = layer.value_heads // layer.key_heads
                sizes = layer.key_dim, layer.key_dim, own * layer.value_dim, own * layer.value_dim
                q, k, v, z = _by_heads(layer.key_heads, sizes)
                b, a = _by_heads(layer.key_heads, (own, own))
                place = f"model.layers.{number}.linear_attn.in_proj_"
                self._take(f"{place}qkvz.weight", {f"{place}qkv.weight": torch.cat((q, k, v)), f"{place}z.weight": z})
                self._take(f"{place}ba.weight", {f"{place}b.weight": b, f"{place}a.weight": a})

    def _take(self, whole: str, parts: dict[str, Tensor]) -> None:
        stored = dict(self.stored)
        if whole in stored and stored[whole].shape[0] == sum(map(len, parts.values())):  # else it is reported
            found = stored.pop(whole)
            for name, rows in parts.items():
                self._rows[name] = whole, rows
                stored[name] = replace(found, shape=(len(rows), *found.shape[1:]))
        self.stored = stored

    def chunks(self, name: str) -> Iterator[Any]:
        if name not in self._rows:
            return self._source.chunks(name)
        whole, rows = self._rows[name]
        return iter((_picked(_whole(self._source.chunks(whole)), rows),))


def _by_heads(heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of each part, if every head has all parts side by side."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return [part.flatten() for part in torch.split(rows, [*sizes], 1)]


def translated(source: Source, config: ModelConfig) -> Source:
    """The source of a model's weights, with its tensors as the decoder reads them. A GGUF file has some of them so."""
    if config.model_type == "gpt_oss" and not source.directory.is_file():
        return OssSource(source)
    both: list[Any] = [getattr(source, "checkpoint", source), source]  # a quantized one has another inside
    for each in both if isinstance(both[0], Checkpoint) else ():
        each.stored = dict(chain.from_iterable(starmap(_apart, each.stored.items())))
    if config.model_type in RENAMED:
        source = Renamed(source, RENAMED[config.model_type])
    if any(name.startswith(TEXT) for name in source.stored):
        log.warning("%s: only the text model is loaded; images are not read", source.directory)
        source = Renamed(source, _alone)
        source.stored = {name: stored for name, stored in source.stored.items() if not name.startswith(IMAGES)}
    if any("qkv_proj" in name or "gate_up_proj" in name for name in source.stored):
        source = Unfused(source, config)
    if config.model_type == "qwen3_next":
        source = Interleaved(source, config)
    if any(type(layer) is GatedLayer for layer in config.layers):
        source = Gated(source, config)
    if any((layer.rope or config.rope_parameters).partial_rotary_factor < 1 for layer in config.layers):
        source = Paired(source, config)
    if config.logits_multiplier != 1:
        source = Translated(source, partial(_scale_logits, config.logits_multiplier))
    if source.directory.is_file():
        return source
    return Translated(source, _norms_from_zero) if config.model_type in FROM_ZERO else source


def _scale_logits(multiplier: float, name: str, rows: Any) -> Any:
    """The final norm multiplies what lm_head multiplies."""
    return rows.float() * multiplier if name == NORM else rows


FROM_ZERO = ("gemma3_text", *DELTA)  # they multiply by one plus the weight of a norm


def _norms_from_zero(name: str, rows: Any) -> Any:
    return rows.float() + 1 if isinstance(rows, Tensor) and name.endswith("norm.weight") else rows


def _renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces the first of these parts that a name has."""
    return lambda name: next((name.replace(old, new) for old, new in names.items() if old in name), name)


_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _of_mixtral(name: str) -> str:
    """The name that a tensor of Mixtral has in other families."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda found: f"{found[1]}.{_MIXTRAL[found[2]]}.", name)


RENAMED: dict[str, Callable[[str], str]] = {
    "lfm2": _renaming(lfm.NAMES),
    "mixtral": _of_mixtral,
    **dict.fromkeys(DELTA, _renaming(qwen.NAMES)),
}


def _apart(name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
    """The matrices of a tensor that stacks all experts, as transformers keeps them: [experts, rows, columns].
    The weight of a convolution, [channels, 1, taps], as a vector."""
    place, _, kind = name.rpartition(".")
    if kind == "weight" and stored.shape[1:-1] == (1,):
        yield name, replace(stored, shape=(prod(stored.shape),))
        return
    if kind not in FUSED or not place.endswith(".mlp.experts") or len(stored.shape) != 3 or stored.dtype not in DTYPES:
        yield name, stored
        return
    experts, rows, columns = stored.shape
    modules = FUSED[kind]
    shape = rows // len(modules), columns
    nbytes = prod(shape) * DTYPES[stored.dtype].itemsize
    for number, (expert, module) in enumerate(product(range(experts), modules)):
        yield f"{place}.{expert}.{module}.weight", replace(stored, shape=shape, start=stored.start + number * nbytes)


FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
TEXT = "language_model.model.", "model.language_model."
IMAGES = "vision_tower.", "multi_modal_projector.", "visual.", "vision_model."


def _alone(name: str) -> str:
    for prefix in TEXT:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.").removeprefix("model.")  # of lm_head, and of what reads images


class Unfused(Translated):
    """A source that has q, k, v and gate, up apart, where the checkpoint has them as one tensor."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        super().__init__(source, lambda name, rows: rows)
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        inner = config.intermediate_size
        fused = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}, "gate_up_proj": dict.fromkeys(GATED, inner)}
        self._places: dict[str, tuple[str, range]] = {}  # of a part: its tensor in the checkpoint, and its rows there
        self.stored: Mapping[str, Stored] = {}
        for name, stored in source.stored.items():
            *path, module, kind = name.split(".")
            parts = fused.get(module, {})
            if sum(parts.values()) != stored.shape[0]:  # none, or not of these sizes: `check_tensors` reports it
                self.stored[name] = stored
                continue
            first = 0
            for part, rows in parts.items():
                own = ".".join((*path, part, kind))
                self._places[own] = name, range(first, first + rows)
                self.stored[own] = replace(stored, shape=(rows, *stored.shape[1:]))
                first += rows

    def chunks(self, name: str) -> Iterator[Any]:
        whole, place = self._places.get(name, (name, None))
        stop = 0
        for rows in self._source.chunks(whole):
            start, stop = stop, stop + len(rows)
            if place is None:
                yield rows
            elif place.start < stop and start < place.stop:
                part = slice(max(place.start - start, 0), min(place.stop, stop) - start)
                yield rows[part] if isinstance(rows, Tensor) else rows.part(part, slice(None))


GATED = "gate_proj", "up_proj"


class Paired(Translated):
    """A source with the numbers of each head of q and k in another order, where only the first of them are rotated.

    A rotation pairs number i of a head with number i + head_dim / 2. Of a head whose first `rotated` numbers are
    rotated, the checkpoint pairs number i with number i + rotated / 2. Queries and keys have one order, so their
    products stay what they were."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        super().__init__(source, lambda name, rows: rows)
        self._config = config

    def chunks(self, name: str) -> Iterator[Any]:
        found = _ROTATED.fullmatch(name)
        if found is None:
            yield from self._source.chunks(name)
            return
        config = self._config
        rope = config.layers[int(found[1])].rope or config.rope_parameters
        rotated = -(-int(config.head_dim * rope.partial_rotary_factor) // 2) * 2
        yield paired(_whole(self._source.chunks(name)), config.head_dim, rotated)


_ROTATED = re.compile(r"model\.layers\.(\d+)\.self_attn\.[qk]_(?:proj|norm)\.(?:weight|bias)")


def paired(rows: Any, head_dim: int, rotated: int) -> Any:
    """The rows of some heads, with those that rotate together half a head apart."""
    first, still = rotated // 2, (head_dim - rotated) // 2
    numbers = torch.split(torch.arange(head_dim), [first, first, still, still])
    order = torch.cat((numbers[0], numbers[2], numbers[1], numbers[3]))
    index = (torch.arange(0, len(rows), head_dim)[:, None] + order).flatten()
    return _picked(rows, index)


def _picked(rows: Any, index: Tensor) -> Any:
    """Some rows, in this order."""
    if isinstance(rows, Tensor):
        return rows[index]
    return rows.with_rows({name: tensor[index] for name, tensor in rows.by_rows().items()}, rows.dtype)


def _whole(chunks: Iterator[Any]) -> Any:
    """All rows at once."""
    first, *others = chunks
    if not others:
        return first
    if isinstance(first, Tensor):
        return torch.cat((first, *others))
    parts = [part.by_rows() for part in (first, *others)]
    return first.with_rows({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, first.dtype)
