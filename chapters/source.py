"""Finds pieces of a source file by region markers or by Python name, for listings and exercises.

A region is the text between `# region NAME` and its `# endregion`, each on a line of its own. NAME is one word, or
`exercise N.M`. Regions can be nested. A name is unique in its file, but an exercise may have several pieces.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chapters.course import CourseError

_MARKER = re.compile(r"([ \t]*)# ?(region|endregion)\b[ \t]*(.*?)\s*")
_GIVEN = re.compile(r"^[ \t]*# given: exercise \d+\.\d+\n", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w.-]*|exercise \d+\.\d+")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Region:
    """A region: the indexes of its two marker lines, and the indentation of the first."""

    name: str
    first: int
    last: int
    indent: str

    def body(self, lines: Sequence[str]) -> list[str]:
        return list(lines[self.first + 1 : self.last])


@dataclass(frozen=True)
class Body:
    """What is to be written of a function: `lines[first:last]`, its body after the docstring or a region inside it."""

    first: int
    last: int
    indent: str
    is_async_generator: bool = False

    def code(self, lines: Sequence[str]) -> list[str]:
        """Its lines without indentation, blank lines and comments."""
        stripped = [line.strip() for line in lines[self.first : self.last]]
        return [line for line in stripped if line and not line.startswith("#")]


def find_regions(text: str, where: str) -> dict[str, list[Region]]:
    """The pieces of each region of `text`. A stray, repeated or unclosed marker is an error at `where`:line."""
    found: dict[str, list[Region]] = {}
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
            found.setdefault(opened, []).append(Region(opened, first, index, opened_indent))
        elif not _NAME.fullmatch(name):
            raise CourseError(f"{where}:{index + 1}: a region's name is one word or `exercise N.M`, not '{name}'")
        elif (name in found and " " not in name) or any(name == other for other, _, _ in open_):
            raise CourseError(f"{where}:{index + 1}: region '{name}' is already in this file")
        else:
            open_.append((name, index, indent))
    if open_:
        name, first, _ = open_[-1]
        raise CourseError(f"{where}:{first + 1}: region '{name}' is never closed")
    return found


def bodies(text: str, regions: Iterable[Region]) -> list[Body]:
    """What these regions of a Python file hold: the bodies of whole functions, or a part of one."""
    lines, functions = text.split("\n"), list(_functions(ast.parse(text)))
    found: list[Body] = []
    for region in regions:
        if any(function.lineno <= region.first < _end(function) for function in functions):
            found.append(Body(region.first + 1, region.last, region.indent))
            continue
        inside = (each for each in functions if region.first < each.lineno - 1 and _end(each) <= region.last)
        found += filter(None, (_body(function, lines) for function in inside))
    return found


def _functions(node: ast.AST) -> Iterator[Function]:
    """Every function and method that is not inside another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield child
        else:
            yield from _functions(child)


def _end(node: Function) -> int:
    return node.end_lineno or node.lineno


def _body(function: Function, lines: Sequence[str]) -> Body | None:
    """The body after the docstring, with the comments before it; None for a stub (`...`)."""
    written = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if not written or (len(written) == 1 and ast.unparse(written[0]) in ("...", "pass")):
        return None
    first = min([written[0].lineno, *(each.lineno for each in getattr(written[0], "decorator_list", ()))]) - 1
    while not lines[first - 1].strip() or lines[first - 1].lstrip().startswith("#"):
        first -= 1
    streams = isinstance(function, ast.AsyncFunctionDef) and _yields(function.body)
    return Body(first, _end(function), " " * written[0].col_offset, streams)


def _yields(nodes: Iterable[ast.AST]) -> bool:
    """Whether one of these yields, functions inside them apart."""
    return any(
        isinstance(node, ast.Yield) or (not isinstance(node, _FUNCTIONS) and _yields(ast.iter_child_nodes(node)))
        for node in nodes
    )


def replace_lines(text: str, pieces: Iterable[tuple[int, int, Sequence[str]]]) -> str:
    """Replace `lines[first:last]` of `text` for each (first, last, new lines); no two overlap."""
    lines = text.split("\n")
    for first, last, new in sorted(pieces, key=lambda piece: piece[:2], reverse=True):
        lines[first:last] = new
    return "\n".join(lines)


def replace_regions(text: str, where: str, bodies: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Replace the body of each named region of `text`, piece by piece; the markers stay."""
    regions, pieces = find_regions(text, where), []
    for name, new in bodies.items():
        if len(new) != len(regions[name]):
            raise CourseError(f"{where}: {len(regions[name])} pieces of region '{name}', not {len(new)}")
        pieces += [(old.first + 1, old.last, lines) for old, lines in zip(regions[name], new, strict=True)]
    return replace_lines(text, pieces)


def unmarked(text: str, kept: Callable[[str], bool] = lambda name: False, given: bool = False) -> str:
    """The text without the markers of exercises, except around the regions to be `kept`. With `given`, a comment
    in their place names the exercise."""
    text = _GIVEN.sub("", text)
    regions = [each for name, its in find_regions(text, "").items() for each in its if name.startswith("exercise ")]
    pieces: list[tuple[int, int, list[str]]] = []
    for each in regions:
        if not kept(each.name):
            note = [f"{each.indent}# given: {each.name}"] if given else []
            pieces += [(each.first, each.first + 1, note), (each.last, each.last + 1, [])]
    return replace_lines(text, pieces)


def locate(root: Path, anchor: str) -> tuple[str, list[tuple[int, int]]]:
    """The file that `path#name` names, and where in it (lines[first:last]) the region, class, function or
    `Class.method` is; a region may have several pieces."""
    path, _, name = anchor.partition("#")
    if not name or not (root / path).is_file():
        raise CourseError(f"'{anchor}': " + (f"there is no file {path}" if name else "an anchor is path#name"))
    text = (root / path).read_text(encoding="utf-8")
    regions = find_regions(text, path)
    if name in regions:
        return text, [(region.first + 1, region.last) for region in regions[name]]
    defined = list(definitions(ast.parse(text, path))) if path.endswith(".py") else []
    spans = [(first - 1, last) for qualified, first, last in defined if qualified == name]
    if len(spans) == 1:
        return text, spans
    if spans:
        raise CourseError(f"'{anchor}': defined {len(spans)} times; put a region around the one that is meant")
    known = ", ".join(sorted({*regions, *(qualified for qualified, _, _ in defined)})) or "nothing"
    raise CourseError(f"'{anchor}': there is no such region or definition; the file has: {known}")


def listing(root: Path, anchor: str, signature: bool = False) -> str:
    """The source that `path#name` names, dedented and without markers. As a `signature`, each function ends after its
    docstring."""
    text, spans = locate(root, anchor)
    lines: list[str | None] = [None if _MARKER.fullmatch(line) else line.rstrip() for line in text.split("\n")]
    for body in bodies(text, [Region(anchor, first - 1, last, "") for first, last in spans]) if signature else ():
        lines[body.first : body.last] = [f"{body.indent}...", *[None] * (body.last - body.first - 1)]
    pieces = ("\n".join(line for line in lines[first:last] if line is not None) for first, last in spans)
    return "\n\n".join(textwrap.dedent(piece).strip("\n") for piece in pieces)


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """(qualified name, first line, last line) of every class and function, decorators included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield prefix + child.name, first, child.end_lineno or child.lineno
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from definitions(child, prefix)
