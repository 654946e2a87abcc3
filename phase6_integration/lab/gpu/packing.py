"""The folder of a day holds a few files of a bounded size, whatever the stages leave: archives in parts.

One archive is Triton's cache, with which a fresh machine compiles no kernel a second time. Triton notes its files by
absolute paths, so the cache of every day is in the same folder. The other is what stages leave beside their rows.
"""

import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from phase6_integration.lab.gpu.rows import Day, Row, work_folder

CACHE = Path(tempfile.gettempdir()) / "nano-serving-triton"
PART = 15 << 20  # bytes of a file
NOT_LOADED = {".ttir", ".ttgir", ".llir", ".ptx", ".source"}  # what lies between the source and the machine code


def archives(out: Path) -> dict[str, Path]:
    """The folder that each archive of a day holds."""
    return {"reports.tar.gz": work_folder(out), "triton.tar.gz": CACHE}


def pack(day: Day) -> None:
    """Write the archives into the folder of the day, in files of at most PART bytes."""
    for name, folder in archives(day.out).items():
        day.add(lambda folder=folder, name=name: pack_folder(folder, day.out, name), what=name)  # type: ignore[misc]


def pack_folder(folder: Path, out: Path, name: str) -> Row:
    """Pack a folder. The parts of an earlier archive go when the new ones are there."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix not in NOT_LOADED)
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
            for file in files:
                tar.add(file, str(file.relative_to(folder)))
        packed.seek(0)
        written = []
        for number in count():
            if not (data := packed.read(PART)):
                break
            written.append(out / f"new-{name}.{number:02}")
            written[-1].write_bytes(data)
    before, names = parts(out, name), [out / part.name.removeprefix("new-") for part in written]
    for part, final in zip(written, names, strict=True):
        part.replace(final)
    for part in set(before) - set(names):
        part.unlink()
    return {"packed": len(files), "bytes": sum(part.stat().st_size for part in names), "files": len(names)}


def unpack(out: Path) -> None:
    """Unpack the archives of an earlier call, except into a folder that this machine has."""
    for name, folder in archives(out).items():
        if not folder.exists() and (packed := parts(out, name)):
            unpack_parts(packed, folder)


def unpack_parts(packed: Iterable[Path], folder: Path) -> None:
    with tempfile.TemporaryFile() as whole:
        for part in packed:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
        whole.seek(0)
        with tarfile.open(fileobj=whole, mode="r:gz") as tar:
            tar.extractall(folder, filter="data")


def parts(out: Path, name: str) -> list[Path]:
    return sorted(out.glob(f"{name}.[0-9][0-9]"))
