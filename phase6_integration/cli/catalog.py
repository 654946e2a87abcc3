"""Catalog: the models that lie on this machine, and whether they can be served."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.fields import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model. What its configuration does not say, or not in a way that is understood, is None."""

    name: str  # what `nanoserve serve` takes
    family: str | None = None
    parameters: int | None = None
    bytes: int = 0  # of its weights
    dtype: str | None = None
    context: int | None = None  # tokens
    supported: bool = False
    why: str | None = None  # it is not supported


def models() -> list[Entry]:
    """The bundled one, then those of the Hugging Face cache by name."""
    bundled = describe(str(BUNDLED), BUNDLED)
    return [bundled, *(describe(name, place) for name, place in sorted(cached()))]


def cached() -> Iterator[tuple[str, Path]]:
    """The names of the models in the cache, and where each lies: its main branch, or else what came last."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
            yield repository.repo_id, newest.snapshot_path


def describe(name: str, directory: Path) -> Entry:
    """What is in a directory. Nothing is loaded."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    try:
        config = ModelConfig.from_pretrained(directory)
    except (ConfigError, OSError) as error:
        return Entry(name=name, bytes=size, why=str(error))
    missing = lacks(directory)
    return Entry(
        name=name,
        family=config.model_type,
        parameters=config.parameters,
        bytes=size,
        dtype=config.dtype,
        context=config.max_position_embeddings,
        supported=missing is None,
        why=missing,
    )


def lacks(directory: Path) -> str | None:
    """Which files are missing for it to be served; None if it has all."""
    if (directory / INDEX).is_file():
        shards = set(json.loads((directory / INDEX).read_text("utf-8")).get("weight_map", {}).values())
        gone = sorted(shard for shard in shards if not (directory / shard).is_file())
        if gone:
            return f"{len(gone)} of {len(shards)} files of weights are not here, {gone[0]} the first"
    elif not (directory / SINGLE).is_file():
        return "no weights in safetensors are here"
    return None if (directory / "tokenizer.json").is_file() else "there is no tokenizer.json, and a server needs one"
