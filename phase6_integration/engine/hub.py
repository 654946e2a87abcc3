"""Find a model's files: in a local directory, or downloaded from the Hugging Face hub into its cache."""

import logging
from pathlib import Path

from phase0_request.checks import ConfigError

log = logging.getLogger(__name__)
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # no code, no pickles


def directory_of(model: str, revision: str | None = None, download_dir: str | None = None, what: str = "model") -> Path:
    """The directory of a model, or of its tokenizer, given as a directory or as the name of a repository on the hub. A
    directory of that name takes precedence. The log says which of the two was chosen, and the commit. `download_dir`
    replaces the hub's own cache."""
    directory = Path(model)
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(f"revision is for a repository on the hub, and {model} is a directory here")
        log.info(
            "the %s is a directory; the hub is not asked", what, extra={"fields": {"directory": directory.resolve()}}
        )
        return directory
    if directory.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ConfigError(f"there is no directory {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    named = f"{model} in revision {revision}" if revision else model
    try:
        found = Path(snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise ConfigError(f"{model} is neither a directory nor the name of a repository: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{model} is no directory here, and the hub did not give {named} ({type(error).__name__})"
        ) from error
    fields = {"repository": model, "revision": revision or "main", "commit": found.name}
    log.info("the %s is a repository on the hub, since no directory here has its name", what, extra={"fields": fields})
    return found
