"""QuantizedCheckpoint: a checkpoint in which each quantized matrix looks like one tensor."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.extras.quantized.layout import Format, TensorSpec
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.loading.checkpoint import ENCODED, Checkpoint, Stored
from phase2_prefill_decode.loading.config import ModelConfig


class QuantizedCheckpoint:
    """Each quantized matrix is stored under the name of its weight, with its own shape."""

    def __init__(self, source: Checkpoint, format: Format) -> None:
        self.directory = source.directory
        self.faults: list[str] = []
        self.stored = dict(source.stored)
        self.checkpoint, self._format = source, format
        self._parts: dict[str, dict[str, TensorSpec]] = {}  # what each matrix consists of, by the name of its weight
        for name in source.stored:
            module, _, suffix = name.rpartition(".")
            if suffix == format.mark:
                self._add(module, source.stored)
            elif suffix in format.unused:
                self.stored.pop(name, None)

    def _add(self, module: str, stored: Mapping[str, Stored]) -> None:
        """Replace the tensors of a matrix by the matrix, or say what is wrong with them."""
        main = f"{module}.{self._format.main}"
        if main not in stored:
            self.faults.append(f"{main} is missing")
            return
        try:
            shape = self._format.size(stored[main].shape)
            parts = self._format.parts(*shape)
        except ValueError as error:
            self.faults.append(f"{main} {list(stored[main].shape)} cannot be read: {error}")
            return
        parts = {suffix: part for suffix, part in parts.items() if f"{module}.{suffix}" in stored or not part.optional}
        for suffix, part in parts.items():
            found = stored.get(f"{module}.{suffix}")
            if found is None or _sizes(found.shape) != _sizes(part.shape) or found.dtype not in part.dtypes:
                what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                wanted = f"{' or '.join(part.dtypes)} {list(part.shape)}"
                self.faults.append(f"{module}.{suffix} does not fit: wanted {wanted}, found {what}")
            self.stored.pop(f"{module}.{suffix}", None)
        self._parts[f"{module}.weight"] = parts
        self.stored[f"{module}.weight"] = Stored(stored[main].file, shape, ENCODED, stored[main].start)

    def nbytes(self, config: ModelConfig) -> None:
        """None: its matrices have several sizes."""

    def chunks(self, name: str) -> Iterator[Tensor | QuantizedWeight]:
        """The rows of a tensor, some at a time; a quantized matrix at once."""
        if name not in self._parts:
            yield from self.checkpoint.chunks(name)
            return
        prefix = name.removesuffix("weight")
        tensors = {s: self.checkpoint.read(f"{prefix}{s}").reshape(part.shape) for s, part in self._parts[name].items()}
        try:
            yield self._format.read(tensors)
        except ConfigError as error:
            raise ConfigError(f"{self.directory}: {name}: {error}") from error


def _sizes(shape: Sequence[int]) -> list[int]:
    """A shape without dimensions of 1, which some libraries write and others omit."""
    return [size for size in shape if size != 1]
