"""A model that a command runs itself: its flags, and the engine."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phase0_request.support.flags import add_fields
from phase0_request.tokenizer import Tokenizer
from phase6_integration.engine.connect_engine import extra_options
from phase6_integration.engine.options import EngineOptions
from phase6_integration.serve_flags import options_from
from phase6_integration.support.progress import reported

if TYPE_CHECKING:
    from rich.console import Console

    from phase6_integration.engine.engine import NanoServingEngine

LOCAL = (
    "revision", "download_dir", "tokenizer", "dtype", "quantization", "kv_cache_dtype", "device",
    "tensor_parallel_size", "max_model_len", "kv_cache_pages", "threads",
)  # fmt: skip


def add_local_model(group: argparse._ActionsContainer) -> None:
    add_fields(group, EngineOptions, *extra_options(), only=LOCAL)


def local_model(given: Mapping[str, Any]) -> EngineOptions:
    """The options of the local model."""
    return options_from({name: given[name] for name in ("model", *LOCAL) if name in given})


def local_options(given: Mapping[str, Any]) -> EngineOptions | None:
    """The options of the local model; None if --url names a server. Flags of the other kind are an error."""
    if given["url"] is None:
        if "api_key" in given:
            raise ValueError("--api-key is for a server; name it with --url")
        return local_model(given)
    for name in LOCAL:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is for a local model, and --url names a server")
    return None


def open_engine(options: EngineOptions) -> "NanoServingEngine":
    """A local engine on as many threads as suit the model. ValueError if the model has no tokenizer."""
    from phase6_integration.engine.located import located

    options, _ = located(options)
    if options.tokenizer is None and not Tokenizer.is_in(options.model):
        raise ValueError(f"{options.model} has no tokenizer, so it takes no text; --tokenizer names another")
    with loading():
        from phase6_integration.engine.engine import NanoServingEngine  # loads torch

        given = asdict(options)
        return NanoServingEngine.from_pretrained(**given.pop("more"), **given)


@contextmanager
def loading(words: str = "loading", console: "Console | None" = None) -> Iterator[None]:
    """Show how far the loading of a local model is: beside a spinner on a terminal, as lines on stderr elsewhere."""
    from rich.console import Console

    console = console or Console(stderr=True)
    with (
        console.status(words) as status,
        reported(status.update if console.is_terminal else lambda text: print(text, file=sys.stderr, flush=True)),
    ):
        yield
