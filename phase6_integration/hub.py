"""Find a model's files: in a local directory, or downloaded from the Hugging Face hub into its cache."""

from pathlib import Path

from phase2_prefill_decode.fields import ConfigError

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # no code, no pickles


def directory_of(model: str) -> Path:
    """The directory of a model, given as a directory or as the name of a repository on the hub."""
    directory = Path(model)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ConfigError(f"there is no directory {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise ConfigError(f"{model} is neither a directory nor the name of a repository: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{model} is no directory here, and the hub gave no repository of that name ({type(error).__name__})"
        ) from error
