"""`nanoserve models`: the bundled model and those in the Hugging Face cache, and whether they can be served."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from phase0_request.checks import ConfigError
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.loading.config import ModelConfig
from phase6_integration.engine.flags import Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model. A fact that its configuration does not state is None."""

    name: str  # as `nanoserve serve` takes it
    family: str | None = None
    parameters: int | None = None
    bytes: int = 0  # of its weights
    dtype: str | None = None
    context: int | None = None  # tokens
    supported: bool = False
    why: str | None = None  # it is not supported


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", default=False, help="print a JSON list (off)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    entries = [describe(str(BUNDLED), BUNDLED), *(describe(name, place) for name, place in sorted(_cached()))]
    if given.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        _print_table(entries)
    return 0


def _cached() -> Iterator[tuple[str, Path]]:
    """Name and directory of each model in the cache: of its main branch, or of its newest revision."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
            yield repository.repo_id, newest.snapshot_path


def describe(name: str, directory: Path) -> ModelEntry:
    """Read a model's configuration. No weights are loaded."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    try:
        config = ModelConfig.from_pretrained(directory)
    except (ConfigError, OSError) as error:
        return ModelEntry(name=name, bytes=size, why=str(error))
    missing = _missing_files(directory)
    return ModelEntry(
        name=name,
        family=config.model_type,
        parameters=config.parameters,
        bytes=size,
        dtype=config.dtype,
        context=config.max_position_embeddings,
        supported=missing is None,
        why=missing,
    )


def _missing_files(directory: Path) -> str | None:
    """Which files a server would miss; None if all are there."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text("utf-8")).get("weight_map", {}).values())
        gone = sorted(shard for shard in shards if not (directory / shard).is_file())
        if gone:
            return f"{len(gone)} of {len(shards)} weight files are missing, {gone[0]} first"
    elif not (directory / "model.safetensors").is_file():
        return "it has no weights in safetensors"
    return None if (directory / "tokenizer.json").is_file() else "it has no tokenizer.json"


def _print_table(entries: list[ModelEntry]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("model", "family", "parameters", "size", "dtype", "context", "served"):
        number = name in ("parameters", "size", "context")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for entry in entries:
        name = f"{BUNDLED.name} (bundled)" if entry.name == str(BUNDLED) else entry.name
        served = Text("yes", "green") if entry.supported else Text(f"no: {entry.why}", "yellow")
        parameters = f"{entry.parameters / 1e6:,.1f} M" if entry.parameters else ""
        context = f"{entry.context:,}" if entry.context else ""
        table.add_row(Text(name), entry.family, parameters, decimal(entry.bytes), entry.dtype, context, served)
    Console().print(table)
