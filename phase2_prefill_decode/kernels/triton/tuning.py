"""Tuning of the decode kernel: the keys of a split and the tile, as measured on this device, or by default.

`python -m phase2_prefill_decode.lab tune` measures, and writes a file for the device into the cache directory. It is
read once, at the first launch. A file that does not fit is an error, not a reason to use the defaults.
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

ALLOWED = {
    "chunk": (128, 256, 512, 1024, 2048),
    "tile": (16, 32, 64, 128),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
}


@dataclass(frozen=True, slots=True)
class Key:
    """The shape that a tuning is for."""

    head_dim: int
    group: int  # query heads per KV head
    page_size: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The keys of a split, and how the kernel computes it if the queries fit into 16 rows. 0: as `tiling` has it."""

    chunk: int
    tile: int = 0
    num_warps: int = 0
    num_stages: int = 0


def default(group: int) -> Tuning:
    """A split of 64 keys for each query head of a group, from 128 to 512.

    For each number of a head, a split reads 2 * 2 * chunk bytes of keys and values (16 bits), and its float32 results
    are 4 * group bytes, written and read again by the join: 2 * group / chunk as much. 64 * group keeps that at 1/32. A
    larger chunk would leave a GPU idle when few sequences are short: one of 1,000 tokens is four splits in groups of 4.
    """
    return Tuning(min(max(64 * group, 128), 512))


def file_for(name: str) -> Path:
    """The tuning file of the device with this name."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nano-serving"
    return folder / f"decode-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


@cache
def tuned(device: torch.device, key: Key, itemsize: int) -> Tuning:
    """The tuning of a shape on a device. Only types of two bytes are measured."""
    if device.type == "cuda" and itemsize == 2:
        name = torch.cuda.get_device_name(device)
        return read(file_for(name), name).get(key, default(key.group))
    return default(key.group)


# region file
def write(file: Path, device: str, tunings: dict[Key, Tuning]) -> None:
    """Write a tuning file: a row for each shape."""
    rows = [asdict(key) | asdict(tuning) for key, tuning in tunings.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"device": device, "decode": rows}, indent=1) + "\n")


def read(file: Path, device: str) -> dict[Key, Tuning]:
    """Read the tuning file of a device; without a file there are none."""
    try:
        content = json.loads(file.read_bytes())
        if content["device"] != device:
            raise ValueError(f"it is for {content['device']}, this is {device}")
        return dict(map(_row, content["decode"]))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        found = f"has no {error}" if isinstance(error, KeyError) else error
        again = "delete it, or write it anew with `python -m phase2_prefill_decode.lab tune`"
        raise ValueError(f"{file} is no tuning of the decode kernel: {found}; {again}") from None


def _row(row: dict[str, int]) -> tuple[Key, Tuning]:
    for name, allowed in ALLOWED.items():
        if row[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {row[name]!r}")
    key = Key(row["head_dim"], row["group"], row["page_size"])
    if not all(type(number) is int and number > 0 for number in asdict(key).values()):
        raise ValueError(f"a shape is three numbers of at least 1, got {asdict(key)}")
    return key, Tuning(**{name: row[name] for name in ALLOWED})


# endregion
