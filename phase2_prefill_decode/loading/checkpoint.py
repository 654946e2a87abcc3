"""Checkpoint: the tensors of a directory of safetensors files. Shapes are read at once, the data on demand.

A matrix is read some rows at a time, from a mapping of just these: they are copied once, from the page cache to their
destination, and leave the memory of the process when the next are read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phase0_request.support.checks import ConfigError
from phase0_request.support.model_files import read_object
from phase2_prefill_decode.loading.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_TENSORS = 1 << 17  # in all files
ENCODED = "encoded"  # in place of a dtype: rows that are not plain numbers
CHUNK, MULTIPLE = 1 << 19, 64  # numbers that are read at a time, and of how many rows: whole blocks of a packed weight
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I32": torch.int32, "I8": torch.int8,
}  # fmt: skip
MAX_HEADER = 4 << 20  # bytes that list the tensors of a file: 75,000 at the very most, read in half a second


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's place, shape and type, known without reading its data."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16; or ENCODED
    start: int  # byte of the file

    @property
    def chunk(self) -> int:
        """The number of rows that are read at a time."""
        return max(CHUNK // max(prod(self.shape[1:]), 1) // MULTIPLE, 1) * MULTIPLE


class Source(Protocol):
    """A source of weights: the tensors of a model, by the names that transformers gives them."""

    @property
    def directory(self) -> Path:
        """The directory, or the file."""

    @property
    def faults(self) -> Sequence[str]:
        """Reasons why its tensors cannot be used."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    def nbytes(self, config: ModelConfig) -> int | None:
        """The memory that this model's weights take, or None if unknown."""

    def chunks(self, name: str) -> Iterator[Any]:
        """The rows of a tensor, some at a time: plain numbers, or in an ENCODED form."""


class Checkpoint:
    """The tensors of a model directory, in one safetensors file or in several that an index names."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.faults: list[str] = []  # what makes its tensors unusable; none are known here
        self.stored: dict[str, Stored] = {}
        for file in self._files():
            contents = _contents(file)
            if twice := self.stored.keys() & contents.keys():
                raise ConfigError(f"{file} holds {min(twice)}, and another file of the model does too")
            self.stored |= contents
            if len(self.stored) > MAX_TENSORS:
                raise ConfigError(f"{directory} holds more than {MAX_TENSORS} tensors; no supported model has as many")

    def _files(self) -> list[Path]:
        """The files of the weights. The tensors in them are read from the files, not from the index."""
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            return [single]
        if not index.exists():
            pickled = any(self.directory.glob("*.bin"))
            why = "; pickled weights (*.bin) are not read, because loading a pickle runs code" if pickled else ""
            raise ConfigError(f"{self.directory} holds neither {SINGLE} nor {INDEX}{why}")
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ConfigError(f"{index} must hold a weight_map from names of tensors to names of files")
        for name in files.values():
            if not isinstance(name, str) or _leads_out(name):
                raise ConfigError(f"{index} must name files inside its directory, got {name!r}")
        return [self.directory / name for name in sorted({*files.values()})]

    def nbytes(self, config: ModelConfig) -> int:
        """The memory that the weights of this model take."""
        return config.bytes

    def read(self, name: str) -> Tensor:
        """A view of a whole tensor."""
        stored = self.stored[name]
        dtype = DTYPES[stored.dtype]
        nbytes = prod(stored.shape) * dtype.itemsize
        return mapped(stored.file, stored.start, nbytes).view(dtype).view(stored.shape)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor, some at a time."""
        stored = self.stored[name]
        dtype, width = DTYPES[stored.dtype], prod(stored.shape[1:])
        for first in range(0, stored.shape[0], stored.chunk):
            shape = min(stored.chunk, stored.shape[0] - first), *stored.shape[1:]
            part = mapped(stored.file, stored.start + first * width * dtype.itemsize, prod(shape) * dtype.itemsize)
            yield part.view(dtype).view(shape)


def mapped(file: Path, start: int, nbytes: int) -> Tensor:
    """Some bytes of a file, read on use, and in memory as long as the tensor."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_numpy(np.memmap(file, np.uint8, "c", start, (nbytes,)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} has changed while it was read: {error}") from error


def _contents(file: Path) -> dict[str, Stored]:
    """Read a file's list of tensors. The first 8 bytes are the length of the list, which the library checks."""
    try:
        with file.open("rb") as source:
            size = int.from_bytes(source.read(8), "little")
            header = source.read(size) if size <= MAX_HEADER else b""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if size > MAX_HEADER:
        raise ConfigError(
            f"{file} is damaged or was not copied whole: the list of its tensors would take {size} bytes, and at "
            f"most {MAX_HEADER} are read"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is damaged or was not copied whole: {error}") from error
    listed = {name: values for name, values in json.loads(header).items() if name in names}
    return {
        name: Stored(file, tuple(values["shape"]), values["dtype"], 8 + size + values["data_offsets"][0])
        for name, values in listed.items()
    }


def _leads_out(name: str) -> bool:
    """Whether a file name leaves the directory. Links inside the directory are followed."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not name or any(path.anchor or ".." in path.parts for path in paths)
