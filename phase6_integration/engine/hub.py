"""Find a model's files: in a local directory, or downloaded: from the Hugging Face hub into its cache, or, of a model
with a short name, from the Python index."""

import logging
import os
from errno import ENOSPC
from glob import escape
from pathlib import Path
from typing import Any

from phase0_request.connect import is_single_file
from phase0_request.support.checks import ConfigError
from phase6_integration.support.gguf_names import file_of_kind
from phase6_integration.support.named_models import file_of, offered

log = logging.getLogger(__name__)
HUB_SAYS = {  # by status
    None: "it cannot be reached, or this process may not ask it (HF_HUB_OFFLINE)",
    401: "there is none of this name, or it needs a token (HF_TOKEN)",
    403: "its terms must be accepted on its page first",
    404: "there is none of this name and revision",
    429: "it was asked too often; try again later",
}
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # no code, no pickles


def directory_of(model: str, revision: str | None = None, download_dir: str | None = None, what: str = "model") -> Path:
    """The directory or the file of a model, or of its tokenizer, given as such, by a short name or as the name of a
    repository on the hub, REPO:Q4_K_M for a GGUF file in it. Local files take precedence. The log says which was
    chosen, and the commit. `download_dir` replaces the cache."""
    directory, is_file = Path(model), is_single_file(model)
    if model and (os.path.isdir(model) or (is_file and os.path.isfile(model))):  # a name may be too long
        kind = "directory" if os.path.isdir(model) else "file"
        if revision is not None:
            raise ConfigError(f"revision is for a repository on the hub, and {model} is a {kind} here")
        log.info("the %s is a %s; the hub is not asked", what, kind, extra={"fields": {kind: directory.resolve()}})
        return directory
    if model in offered():
        if revision is not None:
            raise ConfigError(f"revision is for a repository on the hub, and {model} is a name of one file")
        file = file_of(model, download_dir)
        log.info("the %s is a file from the Python index", what, extra={"fields": {"name": model, "file": file}})
        return file
    repository, _, kind = model.removeprefix("hf.co/").partition(":")
    if kind and repository.count("/") == 1 and repository[0] not in "./":
        file = gguf_file(repository, kind, revision, download_dir)
        log.info("the %s is a file of a repository on the hub", what, extra={"fields": {"file": file}})
        return file
    if directory.is_absolute() or model.startswith(".") or model.count("/") > 1 or is_file:
        raise ConfigError(f"there is no {'file' if is_file else 'directory'} {model}")
    snapshot = Path(download(model, revision, download_dir, PATTERNS))
    fields = {"repository": model, "revision": revision or "main", "commit": snapshot.name}
    log.info("the %s is a repository on the hub, since no directory here has its name", what, extra={"fields": fields})
    return snapshot


def gguf_file(repository: str, kind: str, revision: str | None, download_dir: str | None) -> Path:
    """The one GGUF file in a repository whose weights are of a kind, such as Q4_K_M."""
    where = repository, revision, download_dir
    try:
        names = [file.filename for file in download(*where, ["*.gguf"], dry_run=True)]
    except ConfigError as error:  # without the hub, what was downloaded
        try:
            folder = Path(download(*where, [f"*{kind.upper()}.gguf"], local_files_only=True))
        except ConfigError:
            raise error from None
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    name = file_of_kind(repository, kind, names)
    return Path(download(*where, [escape(name)]), name)


def download(model: str, revision: str | None, download_dir: str | None, patterns: list[str], **how: Any) -> Any:
    """The result of `snapshot_download` for a repository. A ConfigError says in words why it failed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    named = f"{model} in revision {revision}" if revision else model
    try:
        return snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns, **how)
    except HFValidationError as error:
        raise ConfigError(
            f"{model or 'an empty name'} is neither a directory nor the name of a repository: {error}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        responses = (getattr(one, "response", None) for one in (error, error.__cause__))
        status = next((response.status_code for response in responses if response is not None), None)
        why = "the disk is full" if error.errno == ENOSPC else HUB_SAYS.get(status, f"HTTP {status}")
        names = "" if "/" in model else f"; what has a short name: {', '.join(offered())}"
        raise ConfigError(f"{model} is no directory here, and the hub did not give {named}: {why}{names}") from error
