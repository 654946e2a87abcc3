"""The header of a GGUF file, llama.cpp's format: metadata, which describe model and tokenizer, and where tensors are.

The package `gguf` reads the same, in 15 seconds and half a gigabyte for a vocabulary of 150,000 tokens.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from phase0_request.support.checks import ConfigError

MAGIC = b"GGUF"
VERSIONS = 2, 3
MAX_HEADER = 1 << 25  # bytes; the largest vocabularies take half of it
MAX_VALUES = 1 << 21  # of all arrays; the largest vocabularies have 1.3 million, with scores, types and merges
MAX_ENTRIES = 1 << 15  # of the metadata, and tensors; the largest models have a few thousand
MAX_DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
END_TOKENS = "eos_token_id", "eot_token_id", "eom_token_id"

Value = TypeVar("Value")


class GGUFTensor(NamedTuple):
    """The place and shape of a stored tensor."""

    kind: int  # of its numbers, as ggml numbers them
    shape: tuple[int, ...]  # in the order of torch
    start: int  # byte of the file

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata of a file, and its tensors."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata. ConfigError if it is of another kind, or missing without a default."""
        value = self.metadata.get(name, default)
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{self.file} must hold {name}" + (f", got {value!r}" if name in self.metadata else ""))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All end-of-sequence tokens. A file of gpt-oss names one; the model ends a call of a tool with another."""
        names = [f"tokenizer.ggml.{name}" for name in END_TOKENS]
        ids = [self.get(name, int) for name in names if name in self.metadata]
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and self.metadata.get("general.architecture") == "gpt-oss":
            ids += [tokens.index(token) for token in ("<|return|>", "<|call|>") if token in tokens]
        return tuple(dict.fromkeys(ids))


def read_header(file: str | Path) -> GGUFHeader:
    """Read the header. ConfigError if the file is damaged, or of another version."""
    file = Path(file)
    try:
        with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:  # also of mmap, for an empty file
        raise ConfigError(f"{file} is no GGUF file that can be read: {error}") from error


class _Reader:
    """Reads values one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.position, self.values = content, 0, 0

    def header(self, file: Path) -> GGUFHeader:
        if self.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, pairs = self.number("I"), self.number("Q"), self.number("Q")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; supported are {' and '.join(map(str, VERSIONS))}")
        metadata = self.pairs(pairs, lambda: self.value(self.number("I")))
        stored = self.pairs(tensors, self.tensor)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ValueError(f"general.alignment must be a multiple of 8, got {alignment!r}")
        start = -(-self.position // alignment) * alignment
        placed = {name: tensor._replace(start=start + tensor.start) for name, tensor in stored.items()}
        if any(tensor.start > len(self.content) for tensor in placed.values()):
            raise ValueError("a tensor begins behind the end of the file: it was not copied whole")
        return GGUFHeader(file, metadata, placed)

    def pairs(self, count: int, read: Callable[[], Value]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        if count > MAX_ENTRIES:
            raise ValueError(f"it says that it holds {count} tensors or entries; at most {MAX_ENTRIES} are read")
        for _ in range(count):
            name = self.string()
            if name in values:
                raise ValueError(f"it holds {name!r} twice")
            values[name] = read()
        return values

    def tensor(self) -> GGUFTensor:
        dimensions = self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions; at most {MAX_DIMENSIONS} are possible")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return GGUFTensor(self.number("I"), shape, self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"a value is of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        self.values += count
        if self.values > MAX_VALUES:
            raise ValueError(f"its arrays have {self.values} values; at most {MAX_VALUES} are read")
        if inner == STRING:
            return [self.string() for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"an array is of the unknown type {inner}")
        size = struct.calcsize(NUMBERS[inner])
        return list(struct.unpack(f"<{count}{NUMBERS[inner]}", self.take(count * size)))

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > min(len(self.content), MAX_HEADER):
            raise ValueError(f"its header ends after {self.position} bytes, where {size} more must follow")
        self.position, start = end, self.position
        return self.content[start:end]
