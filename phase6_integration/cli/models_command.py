"""`nanoserve models`: the models on this machine, as a table or as JSON."""

import argparse

from phase6_integration.cli.parsing import Subparsers

UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "the models on this machine, and whether they can be served"
    parser = subparsers.add_parser(
        "models",
        help=about,
        description="The bundled model and those in the Hugging Face cache, and whether they can be served.",
    )
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from phase0_request.tokenizer import BUNDLED
    from phase6_integration.cli.catalog import models

    found = models()
    if given.json:
        print(json.dumps([asdict(entry) for entry in found], indent=2))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("model", "family", "parameters", "size", "dtype", "context", "served"):
        number = name in ("parameters", "size", "context")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for entry in found:
        served = Text("yes", "green") if entry.supported else Text(f"no: {entry.why}", "yellow")
        name = f"{BUNDLED.name} (bundled)" if entry.name == str(BUNDLED) else entry.name
        context = f"{entry.context:,}" if entry.context else ""
        sizes = short(entry.parameters), short(entry.bytes, "B")
        table.add_row(Text(name), entry.family, *sizes, entry.dtype, context, served)
    Console().print(table)
    return 0


def short(count: int | None, unit: str = "") -> str:
    """Two figures or three: 4.2 M, 8.4 MB, 123 k."""
    if not count:
        return ""
    for size, letter in UNITS:
        if count >= size:
            value = count / size
            return f"{value:.0f} {letter}{unit}" if value >= 100 else f"{value:.1f} {letter}{unit}"
    return f"{count} {unit}".strip()
