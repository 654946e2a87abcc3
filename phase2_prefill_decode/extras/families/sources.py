"""What a checkpoint writes otherwise than the decoder reads it. A GGUF file holds it as the decoder reads it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product, starmap
from math import prod
from typing import Any

from torch import Tensor

from phase2_prefill_decode.extras.families.lfm import NAMES as LFM_NAMES
from phase2_prefill_decode.extras.families.oss_source import OssSource
from phase2_prefill_decode.loading.checkpoint import DTYPES, Checkpoint, Source, Stored
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import NORM


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


def translated(source: Source, config: ModelConfig) -> Source:
    """The source of a model's weights, with its tensors as the decoder reads them."""
    if config.model_type == "gpt_oss":
        return OssSource(source)
    if isinstance(source, Checkpoint):
        source.stored = dict(chain.from_iterable(starmap(_apart, source.stored.items())))
    if config.model_type in RENAMED:
        source = Renamed(source, RENAMED[config.model_type])
    if config.logits_multiplier != 1:
        source = Translated(source, partial(_scale_logits, config.logits_multiplier))
    return Translated(source, _norms_from_zero) if config.model_type in FROM_ZERO else source


def _scale_logits(multiplier: float, name: str, rows: Any) -> Any:
    """The final norm multiplies what lm_head multiplies."""
    return rows.float() * multiplier if name == NORM else rows


FROM_ZERO = ("gemma3_text",)  # they multiply by one plus the weight of a norm


def _norms_from_zero(name: str, rows: Any) -> Any:
    return rows.float() + 1 if isinstance(rows, Tensor) and name.endswith("norm.weight") else rows


def _of_lfm(name: str) -> str:
    """The name that a tensor of LFM2 has in other families."""
    return next((name.replace(old, new) for old, new in LFM_NAMES.items() if old in name), name)


_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _of_mixtral(name: str) -> str:
    """The name that a tensor of Mixtral has in other families."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda found: f"{found[1]}.{_MIXTRAL[found[2]]}.", name)


RENAMED: dict[str, Callable[[str], str]] = {"lfm2": _of_lfm, "mixtral": _of_mixtral}


def _apart(name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
    """The matrices of a tensor that has those of all experts, as transformers keeps them: [experts, rows, columns].
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
