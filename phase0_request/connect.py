"""The one module of phase 0 that knows its extras, which read the tokenizer of a model in one file (GGUF)."""

from pathlib import Path

from phase0_request.support.checks import check_extras
from phase0_request.support.model_files import TokenizerFiles


def is_single_file(model: str | Path) -> bool:
    """Whether a model, going by its name, is one file and not a directory."""
    return Path(model).suffix == ".gguf"


def has_tokenizer(file: Path) -> bool:
    check_extras("phase0_request", "a GGUF file")
    from phase0_request.extras import gguf_tokenizer

    return gguf_tokenizer.has_tokenizer(file)


def tokenizer_in(file: Path) -> TokenizerFiles:
    check_extras("phase0_request", "a GGUF file")
    from phase0_request.extras import gguf_tokenizer

    return gguf_tokenizer.read(file)
