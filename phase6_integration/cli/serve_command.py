"""`nanoserve serve`: its flags, which are those of `vllm serve` where it has them, and what becomes of them."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from phase6_integration.cli.parsing import Parser, Subparsers
from phase6_integration.options import DTYPES, EngineOptions
from phase6_integration.server.settings import LOG_FORMATS, LOG_LEVELS, ServerSettings

KEYS = ("NANOSERVE_API_KEY", "VLLM_API_KEY")  # of the environment, one key each
AUTO = ("dtype", "device")  # of these `auto` is what is chosen where nothing is said

# Flag, type, metavar, help. What is not given is left to EngineOptions and ServerSettings.
ENGINE = (
    ("dtype", str, "DTYPE", f"{', '.join(DTYPES)}; auto: as the weights were saved"),
    ("device", str, "DEVICE", "cpu, cuda or cuda:N; auto: a GPU if there is one"),
    ("max-model-len", int, "TOKENS", "most tokens of a prompt and its answer together"),
    ("max-num-seqs", int, "N", "most requests that run at once"),
    ("max-num-batched-tokens", int, "TOKENS", "most tokens of a step"),
    ("max-chunk-size", int, "TOKENS", "most tokens of one prompt in a step"),
    ("kv-cache-pages", int, "PAGES", "pages of keys and values; default: what fits into memory"),
    ("gpu-memory-utilization", float, "SHARE", "of the device's memory, for all that the engine keeps (0.9)"),
    ("scheduling-policy", str, "POLICY", "fcfs, priority or longest-prefix (fcfs)"),
    ("max-num-queued-reqs", int, "N", "most requests that wait; one more is a 429 (2048)"),
    ("request-timeout", float, "SECONDS", "from a request's arrival to its end; later is a 408"),
    ("seed", int, "N", "for requests that bring none"),
    ("threads", int, "N", "of the processor (1 for a small model, else all)"),
    ("hang-timeout", float, "SECONDS", "of silence, and an engine that has work counts as hung (300)"),
)
SWITCHES = (
    ("enable-prefix-caching", "keep computed prefixes for the requests that follow (on)"),
    ("enable-chunked-prefill", "cut long prompts, so that they stall nobody (on)"),
    ("enforce-eager", "launch step by step, without graphs (on; there are none yet)"),
    ("check-invariants", "check the engine's books after every step; slow (off)"),
)
FRONT = (
    ("host", str, "ADDRESS", "to listen on (127.0.0.1)"),
    ("port", int, "PORT", "to listen on; 0: any free one, which the log names (8000)"),
    ("shutdown-timeout", float, "SECONDS", "that running requests get to finish after SIGTERM (25)"),
    ("max-body-bytes", int, "BYTES", "most of a request's body; more is a 413"),
    ("max-header-bytes", int, "BYTES", "most of a request's headers; more is a 431"),
    ("max-choices", int, "N", "most answers of one request: prompts times n (128)"),
    ("max-messages", int, "N", "most messages of one chat (1024)"),
    ("max-logprobs", int, "N", "most alternatives a token may be asked for (20)"),
    ("max-scores", int, "N", "most logprobs of an echo, alternatives included (1048576)"),
    ("send-timeout", float, "SECONDS", "a client may leave what it was sent unread (30)"),
    ("receive-timeout", float, "SECONDS", "a client may take to send a request (60)"),
    ("keepalive", float, "SECONDS", "of silence in a stream, and a comment is sent (15)"),
    ("log-level", str, "LEVEL", f"{', '.join(LOG_LEVELS)} (info)"),
    ("log-format", str, "FORMAT", f"{' or '.join(LOG_FORMATS)} lines (human)"),
)


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "serve a model to OpenAI clients"
    parser = subparsers.add_parser(
        "serve",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        usage="nanoserve serve [MODEL] [flags]",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", nargs="?", help="a directory or a name on the Hugging Face hub (tiny_chat)")
    engine, front = parser.add_argument_group("the engine"), parser.add_argument_group("the server")
    engine.add_argument("--page-size", "--block-size", type=int, metavar="TOKENS", help="of a page of the cache (16)")
    front.add_argument(
        "--served-model-name", nargs="+", action="extend", metavar="NAME", help="what clients call the model"
    )
    front.add_argument("--api-key", action="append", metavar="KEY", help=f"repeatable; also {' and '.join(KEYS)}")
    front.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the template itself")
    for group, flags in ((engine, ENGINE), (front, FRONT)):
        for flag, kind, given, text in flags:
            group.add_argument(f"--{flag}", type=kind, metavar=given, help=text)
    for flag, text in SWITCHES:
        engine.add_argument(f"--{flag}", action=_Switch, help=text)
    parser.set_defaults(run=lambda given: run(given, parser))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """All arguments are checked before anything is loaded."""
    try:
        options, settings = engine_options(vars(given)), server_settings(vars(given), os.environ)
    except ValueError as error:
        parser.error(str(error))
    from phase6_integration.server.serve import serve

    return serve(options, settings)


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """What of the flags is the engine's."""
    named = {field.name for field in fields(EngineOptions)}
    given = {name: value for name, value in given.items() if name in named}
    return EngineOptions(**{name: value for name, value in given.items() if name not in AUTO or value != "auto"})


def server_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerSettings:
    """What of the flags is the front's, with the keys that the environment brings."""
    named = {field.name for field in fields(ServerSettings)}
    chosen = {name: value for name, value in given.items() if name in named}
    keys = [*given.get("api_key", ()), *(environment[name] for name in KEYS if environment.get(name))]
    names = given.get("served_model_name") or [_called(given.get("model", EngineOptions().model))]
    if "chat_template" in given:
        chosen["chat_template"] = _template(given["chat_template"])
    return ServerSettings(served_model_names=tuple(names), api_keys=tuple(keys), **chosen)


def _called(model: str) -> str:
    """A directory goes by its own name: where it lies is nothing for clients."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _template(given: str) -> str:
    """The template a flag names, or is. No file is named like one. Its faults are found now, by no client."""
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
    except SyntaxError as error:  # the Python that jinja makes of it is none
        raise ValueError(f"the chat template has a fault: {error.msg}") from None
    return text


class _Switch(argparse.BooleanOptionalAction):
    """--x and --no-x, with no default shown but that of the help."""

    def __init__(self, option_strings: Any, dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, dest, **keywords | {"default": argparse.SUPPRESS})
