"""Sampling defaults: the values that a model's authors recommend in generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase0_request.support.model_files import read_object
from phase6_integration.engine.connect_engine import default_names

FILE = "generation_config.json"
# The file's names of fields of SamplingParams. `max_tokens` is for chats: completions have the default of OpenAI's API.
NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", *default_names())}
NAMES |= {"max_new_tokens": "max_tokens"}


def sampling_defaults(source: str, directory: Path, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields of SamplingParams. `source` is `auto` for the file in the model's directory, if there is one; `vllm` for
    none; or another directory. Values of `override` replace the file's. ConfigError if one is not allowed."""
    given: Mapping[str, Any] = {}
    if source != "vllm":
        file = (directory if source == "auto" else Path(source)) / FILE
        if file.is_file():
            given = read_object(file)
        elif source != "auto":
            raise ConfigError(f"generation_config must be auto, vllm or a directory with a {FILE}, got {source!r}")
    defaults = _checked(given, f"{file}: " if given else "", "; --generation-config vllm ignores the file")
    if unknown := [name for name in override or () if name not in NAMES]:
        known = ", ".join(NAMES)
        raise ConfigError(f"override_generation_config has values for {known}, and not for {', '.join(unknown)}")
    return defaults | _checked(override or {}, "override_generation_config: ", "")


def _checked(given: Mapping[str, Any], where: str, hint: str) -> dict[str, Any]:
    values = {field: given[name] for name, field in NAMES.items() if given.get(name) is not None}
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ConfigError(f"{where}{error}{hint}") from None
    return values
