"""Copies listings from the source and figures from the results into the text, so that they always agree.

`<!-- weave: path#name -->` on a line of its own owns the fenced block that follows it. A figure is between
`<!-- measured: file.json#dotted.key FORMAT -->` and `<!-- /measured -->`, on one line; its key is looked up in the
result's `figures`, then in the whole result. Markers inside fenced blocks or inline code are ignored.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError
from chapters.source import find_regions, listing

_WEAVE = re.compile(r"( {0,3})<!-- weave: (\S+) -->\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\r]*)\r?")
_MEASURED = re.compile(r"(<!-- measured: (\S+?)#(\S+) (\S+) -->)(.*?)(<!-- /measured -->)")
_ANY_MARKER = re.compile(r"<!--\s*(weave|/?measured)\b")


@dataclass
class Woven:
    """One document before and after weaving, and the problems found."""

    name: str
    before: str
    after: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def drifted(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        pair = (self.before.splitlines(), self.after.splitlines())
        return "\n".join(difflib.unified_diff(*pair, self.name, f"{self.name} (woven)", n=1, lineterm=""))


def weave_all(course: Course) -> list[Woven]:
    """Weave every document without writing. The markers of all sources are checked, too."""
    woven = [weave(course, path) for path in course.documents()]
    markers = Woven("region markers", "")
    for path in course.sources():
        try:
            find_regions(path.read_text(encoding="utf-8"), course.name(path))
        except CourseError as error:
            markers.problems.append(str(error))
    return [*woven, markers] if markers.problems else woven


def weave(course: Course, path: Path) -> Woven:
    """Weave each listing and figure of `path`. One that cannot be woven stays as it is and is a problem."""
    text = path.read_bytes().decode("utf-8")
    woven = Woven(course.name(path), text)
    lines = text.split("\n")
    out: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if _FENCE.fullmatch(line):
            end = _closing(lines, index)
            out += lines[index : end + 1]
            index = end + 1
        elif match := _WEAVE.fullmatch(line):
            out.append(line)
            end = _block_end(lines, index + 1)
            out += _block(course, woven, index + 1, match, lines[index + 1 : end])
            index = end
        else:
            out.append(_figures(course, woven, index + 1, line))
            index += 1
    woven.after = "\n".join(out)
    return woven


def _closing(lines: list[str], opener: int) -> int:
    """The index of the line that closes the fence opened at `opener`, or of the last line."""
    match = _FENCE.fullmatch(lines[opener])
    fence = match[1] if match else ""
    for index in range(opener + 1, len(lines)):
        closer = _FENCE.fullmatch(lines[index])
        if closer and closer[1].startswith(fence) and not closer[2].strip():
            return index
    return len(lines) - 1


def _block_end(lines: list[str], start: int) -> int:
    """The end (exclusive) of the fenced block at `start`; `start` itself if there is none."""
    return _closing(lines, start) + 1 if start < len(lines) and _FENCE.fullmatch(lines[start]) else start


def _block(course: Course, woven: Woven, number: int, marker: re.Match[str], old: list[str]) -> list[str]:
    indent, anchor = marker.groups()
    end = "\r" if "\r\n" in woven.before else ""
    if old and (len(old) == 1 or not _FENCE.fullmatch(old[-1])):
        woven.problems.append(f"{woven.name}:{number}: the fenced block of '{anchor}' is never closed")
        return old
    try:
        body = listing(course.root, anchor).split("\n")
    except (CourseError, SyntaxError) as error:
        woven.problems.append(f"{woven.name}:{number}: {error}")
        return old
    body = [(indent + line if line else "") + end for line in body]
    longest = max((len(run) for line in body for run in re.findall(r"`{3,}", line)), default=0)
    opener = _FENCE.fullmatch(old[0]) if old else None
    if opener and (opener[1][0] == "~" or len(opener[1]) > longest):
        return [old[0], *body, old[-1]]
    fence = "`" * max(3, longest + 1)
    suffix = Path(anchor.partition("#")[0]).suffix
    language = opener[2] if opener else {".py": "python"}.get(suffix, suffix[1:])
    return [indent + fence + language + end, *body, indent + fence + end]


def _figures(course: Course, woven: Woven, number: int, line: str) -> str:
    def in_code(position: int) -> bool:
        return line[:position].count("`") % 2 == 1

    def figure(match: re.Match[str]) -> str:
        if in_code(match.start()):
            return match[0]
        try:
            return match[1] + measured(course, match[2], match[3], match[4]) + match[6]
        except CourseError as error:
            woven.problems.append(f"{woven.name}:{number}: {error}")
            return match[0]

    rest = _MEASURED.sub(lambda match: " " * len(match[0]), line)
    for match in _ANY_MARKER.finditer(rest):
        if not in_code(match.start()):
            woven.problems.append(f"{woven.name}:{number}: a malformed `{match[1]}` marker")
    return _MEASURED.sub(figure, line)


def _at(value: Any, key: str) -> Any:
    """The value at a dotted key, or None. The last part may contain dots: figures may be named after methods."""
    if isinstance(value, dict) and key in value:
        return value[key]
    first, dot, rest = key.partition(".")
    if isinstance(value, list) and first.isdecimal() and int(first) < len(value):
        value = value[int(first)]
    else:
        value = value.get(first) if isinstance(value, dict) else None
    return _at(value, rest) if dot else value


def measured(course: Course, file: str, key: str, spec: str) -> str:
    """The figure at the dotted `key` of a result, formatted with `spec`."""
    path = course.results / file
    if not path.is_file():
        raise CourseError(f"there is no result chapters/results/{file}")
    document = json.loads(path.read_text(encoding="utf-8"))
    value = _at(document.get("figures"), key)
    if value is None:
        value = _at(document, key)
    if not isinstance(value, str | int | float):
        raise CourseError(f"chapters/results/{file} has no number or text at '{key}'")
    try:
        return format(value, spec)
    except ValueError as error:
        raise CourseError(f"'{spec}' cannot format {value!r} at '{key}' of chapters/results/{file}: {error}") from None
