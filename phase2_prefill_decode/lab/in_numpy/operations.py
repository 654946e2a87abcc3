"""The operations of `Forward`, in numpy, and the weights of a checkpoint as it wants them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Integers = NDArray[np.int64]
Sequences = Sequence[tuple[int, int, int, list[int]]]


def weights(file: Path) -> dict[str, Array]:
    """The tensors of a safetensors file in bfloat16: a length, a header of JSON, and the numbers."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            bits = np.frombuffer(data[start + first : start + last], np.uint16).astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(entry["shape"])  # bfloat16 is the upper half of a float32
    return tensors


# region operations
def zeros(rows: int, columns: int) -> Array:
    return np.zeros((rows, columns), np.float32)


def integers(numbers: Sequence[int]) -> Integers:
    return np.array(numbers, np.int64)


def sequences(them: Sequences) -> Sequences:
    return them


def rows(table: Array, numbers: Integers) -> Array:
    return table[numbers]


def linear(x: Array, weight: Array) -> Array:
    return x @ weight.T


def add(x: Array, y: Array) -> Array:
    return x + y


def gated(gate: Array, up: Array) -> Array:
    gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of each row, or of each head if the weight has a head's numbers."""
    heads = x.reshape(-1, len(weight))
    normed: Array = heads / np.sqrt((heads * heads).mean(1, keepdims=True) + np.float32(eps)) * weight
    return normed.reshape(x.shape)


def rotate(x: Array, positions: Integers, head_dim: int, theta: float) -> Array:
    """RoPE: the pairs (i, i + head_dim / 2) of each head are turned by the angles of the position."""
    angles = positions[:, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    cos, sin = (turn(angles).astype(np.float32)[:, None] for turn in (np.cos, np.sin))
    first, second = np.split(x.reshape(len(x), -1, head_dim), 2, axis=2)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), 2).reshape(x.shape)


def store(pages: Array, slots: Integers, new: Array) -> None:
    pages[slots] = new


def attend(q: Array, keys: Array, values: Array, sequences: Sequences, head_dim: int) -> Array:
    """Each token attends to the tokens of its sequence up to itself, read from their slots."""
    out = np.empty_like(q)
    for row, count, position, slots in sequences:
        k, v = (pages[slots].reshape(len(slots), -1, head_dim) for pages in (keys, values))
        heads = q[row : row + count].reshape(count, k.shape[1], -1, head_dim)  # token, KV head, query head of it
        scores = np.einsum("tghd,sgd->ghts", heads, k) * np.float32(head_dim**-0.5)
        later = np.arange(len(slots)) > np.arange(position, position + count)[:, None]
        scores[:, :, later] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out[row : row + count] = np.einsum("ghts,sgd->tghd", scores, v).reshape(count, -1)
    return out


def argmax(x: Array, row: int) -> int:
    return int(x[row].argmax())


def row(x: Array, number: int) -> list[float]:
    found: Any = x[number].tolist()
    return list(found)


# endregion
