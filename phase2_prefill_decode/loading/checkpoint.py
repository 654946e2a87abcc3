"""Checkpoint: the tensors of a directory of safetensors files. Shapes are read at once, the data on demand.

The files are memory-mapped, so a tensor is copied once: from the page cache to its destination.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phase0_request.checks import ConfigError
from phase0_request.model_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_TENSORS = 1 << 17  # of all files
QUANTIZED = "quantized"  # in place of a dtype
MAX_HEADER = 4 << 20  # bytes that list the tensors of a file: 75,000 at the very most, read in half a second


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is stored, and its shape and type, known without reading its data."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16; or QUANTIZED


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
        """The files of the weights. Which tensors they hold is read from them, not from the index."""
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

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Read these tensors, file by file: views of the mapped files, in no particular order."""
        by_file = defaultdict(list)
        for name in names:
            by_file[self.stored[name].file].append(name)
        for file, inside in by_file.items():
            with _opened(file) as tensors:
                for name in inside:
                    yield name, tensors.get_tensor(name)


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


def _leads_out(name: str) -> bool:
    """Whether a file name leaves the directory. Links inside the directory are followed."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not name or any(path.anchor or ".." in path.parts for path in paths)
