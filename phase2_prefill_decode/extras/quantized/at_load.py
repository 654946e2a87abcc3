"""Quantization of a model when it is loaded: a source that quantizes what another one reads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from phase0_request.support.checks import ConfigError, check_choice
from phase2_prefill_decode.extras.quantized.layout import ROUTERS, SCHEMES, bytes_in
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.streams import Rows
from phase2_prefill_decode.loading.checkpoint import ENCODED, Source
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import EMBED_TOKENS, HEAD


@dataclass(frozen=True, slots=True)
class Quantization:
    """A transform: the matrices of the layers in one of SCHEMES, or with `embeddings` all."""

    scheme: str
    embeddings: bool = False

    def __post_init__(self) -> None:
        check_choice("quantization", self.scheme, SCHEMES)

    def __call__(self, source: Source, config: ModelConfig, device: torch.device) -> Source:
        if any(stored.dtype == ENCODED for stored in source.stored.values()):
            raise ConfigError(
                f"{source.directory} is quantized already; quantization={self.scheme} is for other models"
            )
        return QuantizingSource(source, self, getattr(torch, config.dtype), device)


class QuantizingSource:
    """A source that quantizes matrices on the device that they are loaded to."""

    def __init__(self, source: Source, how: Quantization, dtype: torch.dtype, device: torch.device) -> None:
        self.directory, self.faults = source.directory, source.faults
        self._source, self._scheme = source, how.scheme
        routers = tuple(f".{name}.weight" for name in ROUTERS)
        plain = routers if how.embeddings else (*routers, EMBED_TOKENS, HEAD)
        self.stored = {
            name: replace(stored, dtype=ENCODED) if len(stored.shape) > 1 and not name.endswith(plain) else stored
            for name, stored in source.stored.items()
        }
        self._dtype, self._device = dtype, device

    def nbytes(self, config: ModelConfig) -> int:
        return bytes_in(config, self._scheme)

    def chunks(self, name: str) -> Iterator[Rows]:
        is_encoded = self.stored[name].dtype == ENCODED
        for rows in self._source.chunks(name):
            yield quantize(rows.to(self._device, self._dtype), self._scheme) if is_encoded else rows
