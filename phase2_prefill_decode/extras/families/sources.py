"""What a checkpoint writes otherwise than the decoder reads it. A GGUF file holds it as the decoder reads it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from phase2_prefill_decode.loading.checkpoint import Source
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


def translated(source: Source, config: ModelConfig) -> Source:
    """The source of a model's weights, with its tensors as the decoder reads them."""
    if config.logits_multiplier != 1:
        source = Translated(source, partial(_scale_logits, config.logits_multiplier))
    return Translated(source, _norms_from_zero) if config.model_type in FROM_ZERO else source


def _scale_logits(multiplier: float, name: str, rows: Any) -> Any:
    """The final norm multiplies what lm_head multiplies."""
    return rows.float() * multiplier if name == NORM else rows


FROM_ZERO = ("gemma3_text",)  # they multiply by one plus the weight of a norm


def _norms_from_zero(name: str, rows: Any) -> Any:
    return rows.float() + 1 if isinstance(rows, Tensor) and name.endswith("norm.weight") else rows
