"""Parts of the text that are written by the code they describe: `<!-- generated: NAME -->` owns the lines up to
`<!-- /generated -->`."""

import argparse
from collections.abc import Callable, Sequence


def flags() -> list[str]:
    """The flags of `nanoserve serve`, by group."""
    from phase6_integration.cli.serve_command import add_flags
    from phase6_integration.engine.flags import Parser

    parser = Parser(prog="nanoserve serve")
    add_flags(parser)
    lines: list[str] = []
    for group in ("engine", "server"):
        lines += [f"| flag: {group} | default in parentheses |", "|---|---|"]
        lines += [f"| {_invocation(action)} | {_cell(action.help or '')} |" for action in actions_of(parser, group)]
        lines.append("")
    return lines[:-1]


def actions_of(parser: argparse.ArgumentParser, group: str) -> Sequence[argparse.Action]:
    (found,) = (each for each in parser._action_groups if each.title == group)
    return found._group_actions


def _invocation(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


GENERATED: dict[str, Callable[[], list[str]]] = {"flags": flags}
