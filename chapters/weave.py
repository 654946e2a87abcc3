"""Copies listings from the source and figures from the results into the text, so that they always agree.

`<!-- weave: path#name -->` on a line of its own owns the fenced block that follows it; with `signature` after the
name, functions end after their docstrings. `<!-- answers: N -->` owns the lines up to `<!-- /answers -->`: the answers
to the exercises of phase N. No listing may show their code. `<!-- generated: NAME -->` owns the lines up to
`<!-- /generated -->`: what the function of that name in `generated.py` writes. A figure is between
`<!-- measured: file.json#dotted.key FORMAT -->` and `<!-- /measured -->`, on one line; its key is looked up in the
result's `figures`, then in the whole result. Markers inside fenced blocks or inline code are ignored.
"""

from __future__ import annotations

import difflib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError
from chapters.exercises import Exercise, need
from chapters.generated import GENERATED
from chapters.source import find_regions, listing, locate

_WEAVE = re.compile(r"( {0,3})<!-- weave: (\S+)( signature)? -->\s*")
_OWNED = re.compile(r"<!-- (answers|generated): (\w+) -->\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\r]*)\r?")
_MEASURED = re.compile(r"(<!-- measured: (\S+?)#(\S+) (\S+) -->)(.*?)(<!-- /measured -->)")
_ANY_MARKER = re.compile(r"<!--\s*(weave|/?measured|/?answers|/?generated)\b")


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
    hidden = answered(course)
    woven = [weave(course, path, hidden) for path in course.documents()]
    markers = Woven("region markers", "")
    for path in course.sources():
        try:
            find_regions(path.read_text(encoding="utf-8"), course.name(path))
        except CourseError as error:
            markers.problems.append(str(error))
    return [*woven, markers] if markers.problems else woven


def answered(course: Course) -> list[Exercise]:
    """The exercises with an answer in some document: no listing may show code of theirs."""
    texts = [path.read_text(encoding="utf-8") for path in course.documents()]
    phases = sorted(
        {int(number) for text in texts for number in re.findall(r"^<!-- answers: (\d+) -->\s*$", text, re.MULTILINE)}
    )
    return [exercise for phase in phases for exercise in need(course, course.phase(phase))]


def weave(course: Course, path: Path, hidden: Sequence[Exercise] = ()) -> Woven:
    """Weave each listing, figure and answer of `path`. One that cannot be woven stays as it is and is a problem, and so
    is a listing with code of a `hidden` exercise."""
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
            out += _block(course, woven, index + 1, match, lines[index + 1 : end], hidden)
            index = end
        elif match := _OWNED.fullmatch(line):
            closing = f"<!-- /{match[1]} -->"
            end = next((at for at in range(index + 1, len(lines)) if lines[at].rstrip() == closing), index)
            try:
                if end == index:
                    raise CourseError(f"no `{closing}` follows")
                carriage = line[len(line.rstrip("\r")) :]
                out += [line, *(text + carriage for text in _owned(course, match[1], match[2])), lines[end]]
            except CourseError as error:
                woven.problems.append(f"{woven.name}:{index + 1}: {error}")
                out += lines[index : end + 1]
            index = end + 1
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


def _block(
    course: Course, woven: Woven, number: int, marker: re.Match[str], old: list[str], hidden: Sequence[Exercise]
) -> list[str]:
    indent, anchor, signature = marker.groups()
    end = "\r" if "\r\n" in woven.before else ""
    if old and (len(old) == 1 or not _FENCE.fullmatch(old[-1])):
        woven.problems.append(f"{woven.name}:{number}: the fenced block of '{anchor}' is never closed")
        return old
    try:
        body = listing(course.root, anchor, bool(signature)).split("\n")
        given_away = () if signature else _given_away(course, anchor, hidden)
        woven.problems += [
            f"{woven.name}:{number}: '{anchor}' shows the answer to exercise {id}; show its signature"
            for id in given_away
        ]
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


def _given_away(course: Course, anchor: str, hidden: Sequence[Exercise]) -> list[str]:
    """The ids of the exercises with code in what the anchor names."""
    its = [exercise for exercise in hidden if exercise.file == anchor.partition("#")[0]]
    text, spans = locate(course.root, anchor) if its else ("", [])
    return [
        exercise.id
        for exercise in its
        if any(first < body.last and body.first < last for first, last in spans for body in exercise.bodies(text))
    ]


def _owned(course: Course, kind: str, name: str) -> list[str]:
    """The lines of a block of text that belongs to a marker."""
    if kind == "answers":
        return _answers(course, int(name))
    if name not in GENERATED:
        raise CourseError(f"nothing generates {name!r}; there is {', '.join(GENERATED)}")
    return GENERATED[name]()


def _answers(course: Course, phase: int) -> list[str]:
    """The answers to a phase's exercises, each folded."""
    lines: list[str] = []
    for exercise in need(course, course.phase(phase)):
        code = listing(course.root, f"{exercise.file}#{exercise.region}")
        summary = f"<summary>{exercise.id} {html.escape(exercise.title, quote=False)}</summary>"
        lines += [
            "<details>",
            summary,
            "",
            "```python",
            f"# {exercise.file}",
            *code.split("\n"),
            "```",
            "",
            "</details>",
        ]
    return lines


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
