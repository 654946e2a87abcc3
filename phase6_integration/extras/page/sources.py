"""The source lines that the viewer shows for each mechanism, read from this installation."""

import ast
import json
import textwrap
from pathlib import Path
from typing import Any

VIEWER = Path(__file__).parent / "static" / "viewer"
ROOT = Path(__file__).parents[3]
MOST = 48  # lines


def mechanisms() -> dict[str, Any]:
    """The viewer's table: for each mechanism its file, the dotted name in it, and the section of the book."""
    _, _, table = (VIEWER / "mechanisms.js").read_text("utf-8").partition("MECHANISMS = ")
    found: dict[str, Any] = json.loads(table.strip().removesuffix(";"))
    return found


def sources() -> dict[str, dict[str, Any]]:
    """The first line number of each mechanism, and its text; only the beginning, if it is long."""
    found = {}
    for key, about in mechanisms().items():
        text = (ROOT / about["file"]).read_text("utf-8")
        node: Any = ast.parse(text)
        for name in about["name"].split("."):
            node = next(each for each in node.body if getattr(each, "name", None) == name)
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        lines = text.splitlines()[first - 1 : node.end_lineno]
        shown = textwrap.dedent("\n".join(lines[:MOST]))
        found[key] = {"line": first, "text": shown + "\n    ..." * (len(lines) > MOST)}
    return found
