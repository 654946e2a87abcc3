"""Checkpoint: the tensors that a directory of safetensors files holds: shapes at once, numbers when asked for.

The files are mapped into memory, so a tensor that is read is copied once: from the page cache to where it belongs.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phase0_request.model_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as files say it


class WeightsError(ValueError):
    """Files that do not hold the weights they should."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: BF16


class Checkpoint:
    """One file, or several with an index that says which tensor is in which."""

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
            why = "; pickled weights (*.bin) are not read, because to read a pickle is to run it" if pickled else ""
            raise WeightsError(f"{self.directory} holds neither {SINGLE} nor {INDEX}{why}")

    def _read_shards(self, index: dict[str, str]) -> None:
        promised = defaultdict(set)
        for name, file in index.items():
            promised[file].add(name)
        faults = []
        for file, names in sorted(promised.items()):
            contents = _contents(self.directory / file)
            faults += [f"{name} is not in {file}" for name in sorted(names - contents.keys())]
            faults += [f"{name} in {file} is not in the index" for name in sorted(contents.keys() - names)]
            self.stored |= contents
        if faults:
            raise WeightsError(listed(f"{self.directory / INDEX} and its files do not agree", faults))

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, file by file: views of the mapped files, in whatever order they lie there."""
        by_file = defaultdict(list)
        for name in names:
            by_file[self.stored[name].file].append(name)
        for file, inside in by_file.items():
            with _opened(file) as tensors:
                for name in inside:
                    yield name, tensors.get_tensor(name)


class InMemory:
    """Tensors that are there already, by the names that a checkpoint would have for them."""

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
        raise WeightsError(f"{file} cannot be read: {error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{file} is damaged or was not copied whole: {error}") from error


def _contents(file: Path) -> dict[str, Stored]:
    with _opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: Stored(file, tuple(piece.get_shape()), piece.get_dtype()) for name, piece in slices.items()}


def _index(file: Path) -> dict[str, str]:
    """Which file each tensor is in."""
    try:
        files = read_object(file).get("weight_map")
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(files, dict) or not files:
        raise WeightsError(f"{file} must hold a weight_map from names of tensors to names of files")
    for name in files.values():
        if not isinstance(name, str) or _leads_out(name):
            raise WeightsError(f"{file} must name files inside its directory, got {name!r}")
    return files


def _leads_out(name: str) -> bool:
    """Judged by the name alone: what is a link in the directory was put there by whoever made it."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not name or any(path.anchor or ".." in path.parts for path in paths)


def listed(what: str, faults: list[str]) -> str:
    """All of them, a line each."""
    return "\n  ".join([f"{what}:", *faults])
