"""`nanoserve generate`: prompts from the command line, a file or a pipe; answers as text or as lines of JSON."""

import argparse
import sys
from pathlib import Path
from typing import Any

from phase6_integration.cli.clients import add_model, add_server, key_of, model_options
from phase6_integration.cli.parsing import Parser, Subparsers

# Flag, type, metavar, help. What is not given is left to SamplingParams, but for the two that have another default.
SAMPLING = (
    ("max-tokens", int, "N", "most tokens of an answer (128)"),
    ("temperature", float, "T", "0: always the likeliest token (0)"),
    ("top-p", float, "P", "draw from the likeliest that have this probability together (1)"),
    ("top-k", int, "K", "draw from so many of the likeliest; 0: from all (0)"),
    ("seed", int, "N", "of what is drawn"),
)
DEFAULTS = {"max_tokens": 128, "temperature": 0.0}


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "continue prompts, with a model run here or by a server"
    parser = subparsers.add_parser(
        "generate",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Prompts are arguments, or the lines of a file or of a pipe.",
        usage="nanoserve generate [PROMPT ...] [flags]",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to continue")
    parser.add_argument("--file", metavar="FILE", help="with a prompt on each line; - is the standard input")
    parser.add_argument("--chat", action="store_true", default=False, help="each prompt is a message to be answered")
    parser.add_argument("--json", action="store_true", default=False, help="a line of JSON for each prompt")
    draw, server = parser.add_argument_group("what is drawn"), parser.add_argument_group("a server instead")
    for flag, kind, given, text in SAMPLING:
        draw.add_argument(f"--{flag}", type=kind, metavar=given, help=text)
    draw.add_argument("--stop", action="append", metavar="TEXT", help="the answer ends before it; repeatable")
    add_model(parser, flag=True)
    add_server(server)
    parser.set_defaults(run=lambda given: run(given, parser))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 if every prompt was answered, 1 if not."""
    from phase0_request.params import SamplingParams
    from phase6_integration.cli import generation
    from phase6_integration.http_client import LostError, RefusedError, Target, UnreachableError

    options: dict[str, Any] = vars(given)
    names = [flag.replace("-", "_") for flag, *_ in SAMPLING] + ["stop"]
    asked = DEFAULTS | {name: options[name] for name in names if name in options}
    try:
        params = SamplingParams(**asked)
        engine = model_options(options)
        target = Target.of(options["url"], key_of(options)) if options["url"] else None
        prompts = wanted(options.get("prompts", []), options.get("file"))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        if target is None:
            done = generation.here(engine, prompts, options["chat"], params)
        else:
            done = generation.there(target, options.get("model"), prompts, options["chat"], asked)
    except (ValueError, UnreachableError, LostError, RefusedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for one in done:
        print(one.line() if options["json"] else one.words(alone=len(done) == 1))
    return 1 if any(one.error for one in done) else 0


def wanted(prompts: list[str], file: str | None) -> list[str]:
    """The prompts given, or the lines of the file or the pipe. ValueError if there is none."""
    if prompts and file is not None:
        raise ValueError("give prompts or --file, not both")
    if not prompts:
        if file is None and sys.stdin.isatty():
            raise ValueError("no prompt: give one, or --file, or pipe some in")
        text = sys.stdin.read() if file in (None, "-") else Path(file).read_text("utf-8")
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty" if prompts else "no prompt: there is no line with text in it")
    return prompts
