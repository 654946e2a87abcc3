"""Finds pieces of a source file by region markers or by Python name, for listings and exercises.

A region is the text between `# region NAME` and its `# endregion`, each on a line of its own. NAME is one word, or
`exercise N.M`. Regions can be nested; a name is unique in its file.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chapters.course import CourseError

_MARKER = re.compile(r"([ \t]*)# ?(region|endregion)\b[ \t]*(.*?)\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*|exercise \d+\.\d+")


@dataclass(frozen=True)
class Region:
    """A region: the indexes of its two marker lines, and the indentation of the first."""

    name: str
    first: int
    last: int
    indent: str

    def body(self, lines: Sequence[str]) -> list[str]:
        return list(lines[self.first + 1 : self.last])


def find_regions(text: str, where: str) -> dict[str, Region]:
    """All regions of `text` by name. A stray, repeated or unclosed marker is an error at `where`:line."""
    found: dict[str, Region] = {}
    open_: list[tuple[str, int, str]] = []
    for index, line in enumerate(text.split("\n")):
        match = _MARKER.fullmatch(line)
        if match is None:
            continue
        indent, kind, name = match.groups()
        if kind == "endregion":
            if not open_:
                raise CourseError(f"{where}:{index + 1}: `# endregion` closes nothing")
            opened, first, opened_indent = open_.pop()
            if name not in ("", opened):
                raise CourseError(f"{where}:{index + 1}: `# endregion {name}` closes region '{opened}'")
            found[opened] = Region(opened, first, index, opened_indent)
        elif not _NAME.fullmatch(name):
            raise CourseError(f"{where}:{index + 1}: a region's name is one word or `exercise N.M`, not '{name}'")
        elif name in found or any(name == other for other, _, _ in open_):
            raise CourseError(f"{where}:{index + 1}: region '{name}' is already in this file")
        else:
            open_.append((name, index, indent))
    if open_:
        name, first, _ = open_[-1]
        raise CourseError(f"{where}:{first + 1}: region '{name}' is never closed")
    return found


def replace_bodies(text: str, where: str, bodies: Mapping[str, Sequence[str]]) -> str:
    """Replace the body of each named region of `text`; the markers stay."""
    lines = text.split("\n")
    regions = find_regions(text, where)
    for name in sorted(bodies, key=lambda name: regions[name].first, reverse=True):
        lines[regions[name].first + 1 : regions[name].last] = bodies[name]
    return "\n".join(lines)


def listing(root: Path, anchor: str) -> str:
    """The source that `path#name` names: a region, class, function or `Class.method`; dedented, without markers."""
    path, _, name = anchor.partition("#")
    if not name or not (root / path).is_file():
        raise CourseError(f"'{anchor}': " + (f"there is no file {path}" if name else "an anchor is path#name"))
    text = (root / path).read_text(encoding="utf-8")
    lines = text.split("\n")
    regions = find_regions(text, path)
    piece = regions[name].body(lines) if name in regions else _definition(text, path, name, regions)
    kept = [line.rstrip() for line in piece if not _MARKER.fullmatch(line)]
    return textwrap.dedent("\n".join(kept)).strip("\n")


def _definition(text: str, path: str, name: str, regions: Mapping[str, Region]) -> list[str]:
    definitions = list(_definitions(ast.parse(text, path), "")) if path.endswith(".py") else []
    spans = [(first, last) for qualified, first, last in definitions if qualified == name]
    if len(spans) == 1:
        first, last = spans[0]
        return text.split("\n")[first - 1 : last]
    if spans:
        raise CourseError(f"'{path}#{name}': defined {len(spans)} times; put a region around the one that is meant")
    known = ", ".join(sorted({*regions, *(qualified for qualified, _, _ in definitions)})) or "nothing"
    raise CourseError(f"'{path}#{name}': there is no such region or definition; the file has: {known}")


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """(qualified name, first line, last line) of every class and function, decorators included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield prefix + child.name, first, child.end_lineno or child.lineno
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _definitions(child, prefix)
