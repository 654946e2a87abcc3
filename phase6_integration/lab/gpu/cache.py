"""Triton's cache as files of the day: with them a fresh machine compiles no kernel a second time.

Triton notes its files by absolute paths, so the cache of every day is in the same folder.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path

from phase6_integration.lab.gpu.rows import Day, Row

FOLDER = Path(tempfile.gettempdir()) / "nano-serving-triton"
NAME = "triton.tar.gz"
PART = 15 << 20  # bytes of a file
NOT_LOADED = {".ttir", ".ttgir", ".llir", ".ptx", ".source"}  # what lies between the source and the machine code


def pack(day: Day) -> None:
    """Write the cache into the folder of the day, in files of at most PART bytes."""
    day.add(lambda: pack_folder(FOLDER, day.out), what="Triton's cache")


def pack_folder(folder: Path, out: Path) -> Row:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix not in NOT_LOADED)
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
            for file in files:
                tar.add(file, str(file.relative_to(folder)))
        packed.seek(0)
        for part in parts(out):
            part.unlink()
        while data := packed.read(PART):
            (out / f"{NAME}.{len(parts(out)):02}").write_bytes(data)
    return {"packed": len(files), "bytes": sum(part.stat().st_size for part in parts(out)), "files": len(parts(out))}


def unpack(out: Path, folder: Path = FOLDER) -> bool:
    """Unpack what an earlier call has left, unless this machine has a cache. False if there is nothing to unpack."""
    if folder.exists() or not parts(out):
        return False
    with tempfile.TemporaryFile() as packed:
        for part in parts(out):
            with part.open("rb") as file:
                shutil.copyfileobj(file, packed)
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r:gz") as tar:
            tar.extractall(folder, filter="data")
    return True


def parts(out: Path) -> list[Path]:
    return sorted(out.glob(f"{NAME}.*"))
