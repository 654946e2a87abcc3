"""The flags of a server: the fields of EngineOptions and ServerSettings, named as in `vllm serve` where it has them. An
application of Ray Serve has them as arguments."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phase0_request.connect import is_single_file
from phase0_request.support.flags import Parser, add_fields, values_of
from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings, default_hosts
from phase6_integration.engine.connect_engine import engine_options, extra_options
from phase6_integration.engine.options import EngineOptions

# Flags in people's scripts for `vllm serve`, with the values that ask for what is so here anyway.
AS_IT_IS: Mapping[str, Sequence[str]] = {
    "--pipeline-parallel-size": ["1"],
    "--data-parallel-size": ["1"],
    "--cpu-offload-gb": ["0"],
    "--swap-space": ["0"],
    "--task": ["auto", "generate"],
    "--runner": ["auto", "generate"],
    "--load-format": ["auto", "safetensors"],
    "--tokenizer-mode": ["auto"],
    "--response-role": ["assistant"],
}
NOT_LOGGED = "--disable-log-requests", "--no-enable-log-requests"  # what requests say never is


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve serve [MODEL] [flags]"
    parser.add_argument(
        "model",
        nargs="?",
        help="a directory, a GGUF file, a short name (see `nanoserve models`), or a name on the Hugging Face hub, with "
        ":Q4_K_M for a GGUF file there (tiny_chat)",
    )
    engine, server = parser.add_argument_group("engine"), parser.add_argument_group("server")
    add_fields(engine, EngineOptions, *extra_options())
    add_fields(server, ServerSettings, *connect.extra_settings())
    server.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names of the model in requests (the last part of MODEL's path, or its name on the hub)",
    )
    connect.add_key_flag(server)
    server.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the template itself (the model's)")
    for flag, values in AS_IT_IS.items():
        parser.add_argument(flag, choices=values, help=argparse.SUPPRESS)
    parser.add_argument(*NOT_LOGGED, action="store_true", help=argparse.SUPPRESS)


def options_from(given: Mapping[str, Any]) -> EngineOptions:
    """Make EngineOptions from arguments."""
    return engine_options(**values_of(given, EngineOptions, *extra_options()))


def settings_from(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerSettings:
    """Make ServerSettings from arguments, with API keys from the environment."""
    chosen = values_of(given, ServerSettings, *connect.extra_settings())
    chosen |= connect.key_settings(given, environment)
    if "uds" in given:
        if unused := [name for name in ("host", "port") if name in given]:
            raise ValueError(f"--uds is in place of --host and --port, and --{unused[0]} is given too")
        chosen.setdefault("allowed_hosts", ())  # no web page can reach a Unix socket
    chosen.setdefault("allowed_hosts", default_hosts(chosen.get("host", ServerSettings().host)))
    names = given.get("served_model_name") or [_model_name(given.get("model", EngineOptions().model))]
    if "chat_template" in given:
        chosen["chat_template"] = _template(given["chat_template"])
    return connect.settings(served_model_names=tuple(names), **chosen)


def _model_name(model: str) -> str:
    """The name of a directory or file, without its path: clients need not know that."""
    if is_single_file(model):
        return Path(model).stem
    return Path(model).resolve().name if Path(model).is_dir() else model


def _template(given: str) -> str:
    """Read and check the chat template, given as a file or as the template itself."""
    try:
        text = given if "{" in given else Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {given!r}: {error}") from None
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template has a fault in line {error.lineno}: {error.message}") from None
    except SyntaxError as error:  # the Python code that jinja generates is invalid
        raise ValueError(f"the chat template has a fault: {error.msg}") from None
    return text
