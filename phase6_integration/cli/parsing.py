"""Parser: arguments as all commands read them. A mistake is one line that never repeats what may be a secret."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

WRONG_ARGUMENTS = 2


class Parser(argparse.ArgumentParser):
    """Flags in full only; help with a line for each."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=58, width=120),
            **keywords,
        )

    def error(self, message: str) -> NoReturn:
        """`nanoserve serve: what was wrong`, and exit code 2."""
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {message}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Arguments that nobody takes. A flag is named, its value is not: it may be a key."""
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        self.error(f"no such flag: {', '.join(flags)}" if flags else f"{len(unknown)} arguments too many")


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"  # what a command is added to
