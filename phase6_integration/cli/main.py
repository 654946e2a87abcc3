"""Parse `nanoserve COMMAND ...` and run the command."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from phase0_request.core import EngineFailedError
from phase0_request.support.flags import Parser, did_you_mean

# Each module has add_flags(parser) and run(given, parser) -> exit code. Only the chosen one is imported.
COMMANDS = {
    "serve": ("phase6_integration.cli.serve_command", "serve a model over an OpenAI-compatible API"),
    "deploy": ("phase6_integration.cli.deploy_command", "serve a model by many replicas, with Ray Serve"),
    "chat": ("phase6_integration.cli.chat_command", "chat in the terminal, with a local model or a server"),
    "generate": ("phase6_integration.cli.generate_command", "complete prompts with a local model"),
    "models": ("phase6_integration.cli.models_command", "list the models that have a short name, and what loads"),
    "pull": ("phase6_integration.cli.pull_command", "download a model"),
    "bench": ("phase6_integration.cli.bench_command", "put a server under load and measure it"),
    "record": ("phase6_integration.cli.record_command", "write down what a running server does"),
    "replay": ("phase6_integration.cli.replay_command", "make a page of a record, that opens from disk"),
    "trace": ("phase6_integration.cli.trace_command", "make a Chrome trace of a record, for Perfetto"),
    "doctor": ("phase6_integration.cli.doctor_command", "check this machine and run the bundled model on it"),
}

BENCHES = {"compare": "phase6_integration.lab.peers.compare", "ladder": "phase6_integration.lab.ladder"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 success, 1 failure, 2 wrong arguments, 130 Ctrl-C, 141 closed pipe."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if arguments[0] == "bench" and arguments[1:2] and arguments[1] in BENCHES:
        return int(import_module(BENCHES[arguments[1]]).main(arguments[2:], " ".join(["nanoserve", *arguments[:2]])))
    if arguments[:2] == ["bench", "serve"]:  # which `bench` alone is too
        del arguments[1]
    parser = Parser(
        prog="nanoserve",
        description="An LLM serving engine in seven phases.",
        epilog="`nanoserve help COMMAND` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"nano-serving {version('nano-serving')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands = {name: subparsers.add_parser(name, help=help) for name, (_, help) in COMMANDS.items()}
    name = arguments[0]
    if name in COMMANDS:
        module = import_module(COMMANDS[name][0])
        module.add_flags(commands[name])
    elif not name.startswith("-"):
        parser.error(f"no such command: {name}{did_you_mean(name, COMMANDS)}; they are {', '.join(COMMANDS)}")
    given, unknown = parser.parse_known_args(arguments)
    command = commands.get(name, parser)
    if unknown:
        from phase6_integration.engine.connect_engine import absent

        command.refuse(unknown, absent())
    try:
        return int(module.run(given, command))
    except EngineFailedError as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{command.prog}: stopped", file=sys.stderr)
        return 130
