"""Read a model directory's files: its tokenizer, end-of-sequence ids, chat template, names of special tokens."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phase0_request.params import MAX_TOKEN_ID
from phase0_request.support.checks import ConfigError, check_int, invalid

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

MAX_FILE_BYTES = 1 << 24  # of a JSON file, or a template
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """A model's tokenizer, as its files describe it."""

    file: Path  # which has it
    backend: "HFTokenizer"
    eos_ids: Iterable[int]
    chat_template: str | None
    named_tokens: Mapping[str, str]


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """Read the tokenizer of a directory in Hugging Face layout."""
    from tokenizers import Tokenizer as HFTokenizer  # here: whoever reads only a config needs no tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {str(directory)!r}; a model directory is needed that has one "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(directory) writes it for older formats)"
        )
    with unreadable(file):
        backend = HFTokenizer.from_file(str(file))
    ends = eos_ids(directory, backend.token_to_id)
    return TokenizerFiles(file, backend, ends, chat_template(directory), named_tokens(directory))


def eos_ids(directory: Path, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """All end-of-sequence token ids. A model may list several, in up to three files; the union is used."""
    name = named_tokens(directory).get("eos_token")
    eos = token_to_id(name) if name is not None else None
    return frozenset(model_eos_ids(directory)) | (frozenset() if eos is None else {eos})


def model_eos_ids(directory: Path) -> list[int]:
    """The end-of-sequence token ids that config.json and generation_config.json name."""
    ids: list[int] = []
    for file in (directory / "config.json", directory / "generation_config.json"):
        with naming(file):
            ids += eos_ids_in(_optional(file))
    return ids


def eos_ids_in(config: Mapping[str, Any]) -> list[int]:
    """The end-of-sequence token ids in a config.json or a generation_config.json: one, several or none."""
    given = config.get("eos_token_id")
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    return [check_int("eos_token_id", token, 0, MAX_TOKEN_ID) for token in tokens]


def chat_template(directory: Path) -> str | None:
    """The model's chat template, from chat_template.jinja or from tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        with naming(file):
            return _read_text(file)
    template = _optional(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise invalid(f"{directory / 'tokenizer_config.json'}: a chat template", "text", template)
    return template


def named_tokens(directory: Path) -> dict[str, str]:
    """The special tokens by the names that chat templates use: bos_token, eos_token and so on."""
    config = _optional(directory / "tokenizer_config.json")
    values = {name: config.get(name) for name in NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Anything else raises a ConfigError that names the file."""
    try:
        content = json.loads(_read_text(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too long a number or too deep a nesting
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the name of a file in front of an error about its content."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _read_text(file: Path) -> str:
    """The UTF-8 text of a file. An endless one, such as a link to /dev/zero, is read only up to the limit."""
    with file.open("rb") as source:
        content = source.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is longer than {MAX_FILE_BYTES} bytes")
    return content.decode("utf-8")


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """The error for a file that the tokenizers library cannot read."""
    try:
        with panics_raised():
            yield
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file} holds no tokenizer that can be read: {error}") from error


@contextmanager
def panics_raised() -> Iterator[None]:
    """Turn a panic of the tokenizers library into a ValueError: it is a BaseException, which no handler expects."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the tokenizers library has failed") from error
