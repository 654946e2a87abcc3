"""`nanoserve bench`: put a server under load and measure it. Its flags; the work is in `lab.load`."""

import argparse

from phase6_integration.cli.clients import add_server, key_of
from phase6_integration.cli.parsing import Parser, Subparsers

KINDS = ("fixed", "long-tail", "shared-prefix")
# Flag, type, metavar, help. What is not given is left to Workload and Load.
WORKLOAD = (
    ("num-prompts", int, "N", "requests (200)"),
    ("request-rate", float, "RATE", "requests a second on average, whenever they like; inf: all at once (inf)"),
    ("input-len", int, "TOKENS", "of a prompt; of a long tail, the median (128)"),
    ("output-len", int, "TOKENS", "of an answer; of a long tail, the median (64)"),
    ("spread", float, "SIGMA", "long-tail: of the logarithm of a length (1.0)"),
    ("max-input-len", int, "TOKENS", "long-tail: longer prompts are cut (1024)"),
    ("max-output-len", int, "TOKENS", "long-tail: longer answers are cut (512)"),
    ("prefix-len", int, "TOKENS", "shared-prefix: before each prompt (256)"),
    ("num-prefixes", int, "N", "shared-prefix: different ones (4)"),
    ("seed", int, "N", "of times, lengths and prompts (0)"),
)
CLIENT = (
    ("temperature", float, "T", "(0.0)"),
    ("warmups", int, "N", "requests before, which do not count (1)"),
    ("timeout", float, "SECONDS", "for one request (600.0)"),
)


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "put a server under load and measure it"
    parser = subparsers.add_parser("bench", help=about, usage="nanoserve bench [flags]")
    arguments(parser)
    parser.set_defaults(run=lambda given: run(given, parser))


def arguments(parser: Parser) -> None:
    parser.argument_default = argparse.SUPPRESS
    parser.description = (
        "Put a server under load and measure it. Prompts are token ids and answers go on to their limit, so lengths "
        "are exact; tokens are counted by the server's own usage. The figures have the names of `vllm bench serve`."
    )
    work, client = parser.add_argument_group("what is asked"), parser.add_argument_group("how")
    work.add_argument("--workload", dest="kind", choices=KINDS, help="which lengths, and what is shared (fixed)")
    add_server(client, default="http://127.0.0.1:8000")
    client.add_argument("--model", metavar="NAME", help="of the model there (the first that the server names)")
    client.add_argument(
        "--concurrency", "--max-concurrency", type=int, metavar="N", help="most requests at a time (any number)"
    )
    for group, flags in ((work, WORKLOAD), (client, CLIENT)):
        for flag, kind, given, text in flags:
            group.add_argument(f"--{flag}", type=kind, metavar=given, help=text)
    client.add_argument("--no-stream", dest="stream", action="store_false", help="ask for whole answers")
    client.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="what a good request keeps, of ttft, tpot, itl and e2el"
    )
    client.add_argument("--json", metavar="FILE", help="for the figures; - is the standard output, without a table")


def run(given: argparse.Namespace, parser: Parser) -> int:
    """All arguments are checked before anything is asked."""
    from phase6_integration.lab.load.command import execute, load_of

    options = vars(given)
    file = options.get("json")
    try:
        load = load_of(options | {"api_key": key_of(options)})
        if file not in (None, "-"):
            open(file, "a").close()  # that the figures can be written is known before minutes are spent on them
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return execute(load, file, parser.prog)
