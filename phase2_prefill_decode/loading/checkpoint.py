"""Checkpoint: the tensors of a directory of safetensors files. Shapes are read at once, the data on demand.

The files are memory-mapped, so a tensor is copied once: from the page cache to its destination.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phase0_request.checks import ConfigError
from phase0_request.model_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FAULTS = 20  # that one error lists
MAX_HEADER = 4 << 20  # bytes that list the tensors of a file: 75,000 at the very most, read in half a second
MAX_TENSORS = 1 << 17  # of all files
MAX_FILES = 1 << 12
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # in safetensors


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is stored, and its shape and type, known without reading its data."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16


class Checkpoint:
    """The tensors of a model directory, in one safetensors file or in several with an index."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = self.directory / INDEX
        self.stored: dict[str, Stored] = {}
        if (self.directory / SINGLE).exists():
            self.stored = _contents(self.directory / SINGLE)
        elif index.exists():
            self._read_shards(_index(index))
        else:
            pickled = any(self.directory.glob("*.bin"))
            why = "; pickled weights (*.bin) are not read, because loading a pickle runs code" if pickled else ""
            raise ConfigError(f"{self.directory} holds neither {SINGLE} nor {INDEX}{why}")

    def _read_shards(self, index: dict[str, str]) -> None:
        promised = defaultdict(set)
        for name, file in index.items():
            promised[file].add(name)
        if len(promised) > MAX_FILES:
            raise ConfigError(f"{self.directory / INDEX} names {len(promised)} files; at most {MAX_FILES} are read")
        faults, tensors = [], 0
        for file, names in sorted(promised.items()):
            contents = _contents(self.directory / file)
            tensors += len(contents)
            if tensors > MAX_TENSORS:
                raise ConfigError(
                    f"{self.directory} holds more than {MAX_TENSORS} tensors; no supported model has as many"
                )
            faults += [f"{name} is not in {file}" for name in sorted(names - contents.keys())]
            faults += [f"{name} in {file} is not in the index" for name in sorted(contents.keys() - names)]
            self.stored |= contents
        if faults:
            raise ConfigError(listed(f"{self.directory / INDEX} and its files do not agree", faults))

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Read these tensors, file by file: views of the mapped files, in no particular order."""
        by_file = defaultdict(list)
        for name in names:
            by_file[self.stored[name].file].append(name)
        for file, inside in by_file.items():
            with _opened(file) as tensors:
                for name in inside:
                    yield name, tensors.get_tensor(name)


class InMemory:
    """A mapping of tensors with the interface of a checkpoint."""

    directory = "the mapping of tensors"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.stored = {
            name: Stored(Path(), tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in tensors.items()
        }

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensors[name]) for name in names)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged or was not copied whole: {error}") from error


def _contents(file: Path) -> dict[str, Stored]:
    """Read what a file holds. Its first 8 bytes are the length of the list of its tensors."""
    with contextlib.suppress(OSError), file.open("rb") as source:  # the library names what is wrong
        size = int.from_bytes(source.read(8), "little")
        if size > MAX_HEADER:
            raise ConfigError(
                f"{file} is damaged or was not copied whole: the list of its tensors would take {size} bytes, and at "
                f"most {MAX_HEADER} are read"
            )
    with _opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: Stored(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _index(file: Path) -> dict[str, str]:
    """The file of each tensor, from the index."""
    files = read_object(file).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{file} must hold a weight_map from names of tensors to names of files")
    for name in files.values():
        if not isinstance(name, str) or _leads_out(name):
            raise ConfigError(f"{file} must name files inside its directory, got {name!r}")
    return files


def _leads_out(name: str) -> bool:
    """Whether a file name leaves the directory. Links inside the directory are followed."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not name or any(path.anchor or ".." in path.parts for path in paths)


def listed(what: str, faults: list[str]) -> str:
    """Format an error message with one line for each fault, up to MAX_FAULTS."""
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    return "\n  ".join([f"{what}:", *faults[:MAX_FAULTS], *more])
