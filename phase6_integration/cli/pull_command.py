"""`nanoserve pull`: download a model, from the Hugging Face hub once it is known that this engine serves it."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from phase0_request.support.checks import ConfigError
from phase0_request.support.flags import Parser, add_fields
from phase2_prefill_decode.connect import config_of
from phase6_integration.engine.hub import PATTERNS, directory_of, download
from phase6_integration.engine.options import EngineOptions
from phase6_integration.support.named_models import offered

FIRST = ["config.json", "generation_config.json"]
GB = 1e9


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve pull NAME [flags]"
    parser.add_argument(
        "model",
        metavar="NAME",
        help="of a repository on the hub, such as Qwen/Qwen3-0.6B, with :Q4_K_M for a GGUF file in it, or a short name "
        "(needed)",
    )
    add_fields(parser, EngineOptions, only=("revision", "download_dir"))


def run(given: argparse.Namespace, parser: Parser) -> int:
    try:
        print(pull(given.model, getattr(given, "revision", None), getattr(given, "download_dir", None)))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def pull(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of a model, downloaded. A ValueError says why it cannot be, or cannot be served."""
    if model and os.path.exists(model):  # False, not an error, of a name that is too long
        raise ValueError(f"{model} is here already: `nanoserve serve {model}` takes it as it is")
    if ":" in model or model in offered():
        file = directory_of(model, revision, download_dir)
        print(f"{model}: {config_of(file).model_type}, supported", file=sys.stderr)
        return file
    where = model, revision, download_dir
    directory = Path(download(*where, FIRST))
    if not (directory / FIRST[0]).is_file():
        raise ValueError(f"{model} has no config.json; a GGUF file is named by its quantization, {model}:Q4_K_M")
    config = config_of(directory)  # of a model that is not supported, a ConfigError
    about = f"{model}: {config.model_type}, {config.parameters / 1e9:.2g} billion parameters, supported; "
    try:
        files = download(*where, PATTERNS, dry_run=True)
    except ConfigError:  # what was downloaded needs no hub
        directory = Path(download(*where, PATTERNS, local_files_only=True))
        print(about + "all of it is here, and the hub cannot be asked for a newer one", file=sys.stderr)
        return directory
    whole = sum(file.file_size for file in files)
    missing = sum(file.file_size for file in files if file.will_download)
    have = f"{missing / GB:.2f} GB to download" if missing else "all of it is here"
    print(f"{about}{whole / GB:.2f} GB, {have}", file=sys.stderr)
    folder = Path(download_dir or HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if missing > free:
        raise ValueError(f"{missing / GB:.2f} GB are needed, and the disk of {folder} has {free / GB:.2f} GB free")
    return Path(download(*where, PATTERNS))
