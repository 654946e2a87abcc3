"""Copies listings from the source and figures from the results into the text, so that they always agree.

`<!-- weave: path#name -->` on a line of its own owns the fenced block that follows it; with `signature` after the
name, functions end after their docstrings. `<!-- KIND: WHAT -->` owns the text up to `<!-- /KIND -->`:

- `measured: file.json#dotted.key FORMAT`: a figure of a result.
- `answers: N`: the answers to the exercises of chapter N; `answers: N.M N.K`: to these, on one of a chapter's pages. No
  listing may show their code.
- `generated: NAME`: what the function of that name in `generated.py` writes.
- `generated: table NAME`: a table of figures, which `tables/` describes.

Markers inside fenced blocks or inline code are ignored.
"""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chapters.claims import ClaimError
from chapters.course import Course, CourseError
from chapters.exercises import Exercise, every, find, need
from chapters.generated import GENERATED
from chapters.source import find_regions, listing, locate
from chapters.tables import shown, table

# What matters in a document, in the order in which it is tried at each place.
PIECES = re.compile(
    r"""
    ^(?P<marker>(?P<indent>\ {0,3})<!--\ weave:\ (?P<anchor>\S+)(?P<signature>\ signature)?\ -->)\ *$
        (?:\n\ {0,3}(?P<fence>`{3,})[^\n]*\n(?:.*?\n)??\ {0,3}(?P=fence)`*\ *$)?  # a listing, and its block
    |(?P<opening><!--\ (?P<kind>measured|answers|generated):\ (?P<what>[^\n>]+?)\ -->)
        (?P<old>(?:(?!<!--\ \w+:).)*?)(?P<closing><!--\ /(?P=kind)\ -->)
    |^\ {0,3}(?P<block>`{3,}|~{3,})[^\n]*\n(?:.*?^\ {0,3}(?P=block)[`~]*\ *$|.*\Z)  # a fenced block
    |(?P<code>`+)[^\n]+?(?<!`)(?P=code)(?!`)  # inline code
    |<!--\s*/?(?P<malformed>weave|measured|answers|generated)\b
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


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
    hidden = every(course)
    woven = [weave(course, path, hidden) for path in course.documents()]
    markers = Woven("region markers", "")
    for path in course.sources():
        try:
            find_regions(path.read_text(encoding="utf-8"), course.name(path))
        except CourseError as error:
            markers.problems.append(str(error))
    return [*woven, markers]


def weave(course: Course, path: Path, hidden: Sequence[Exercise] = ()) -> Woven:
    """Weave each listing, figure and answer of `path`. One that cannot be woven stays as it is and is a problem, and so
    is a listing with code of a `hidden` exercise."""
    woven = Woven(course.name(path), path.read_text(encoding="utf-8"))

    def replaced(match: re.Match[str]) -> str:
        where = f"{woven.name}:{woven.before.count(chr(10), 0, match.start()) + 1}"
        try:
            if match["anchor"]:
                if not match["signature"]:
                    woven.problems += [
                        f"{where}: {problem}" for problem in _given_away(course, match["anchor"], hidden)
                    ]
                return _listing(course, match)
            if match["kind"]:
                return f"{match['opening']}{_owned(course, path, match['kind'], match['what'])}{match['closing']}"
            if match["malformed"]:
                raise CourseError(f"a malformed `{match['malformed']}` marker")
        except (CourseError, ClaimError, SyntaxError) as error:
            woven.problems.append(f"{where}: {error}")
        return match[0]

    woven.after = PIECES.sub(replaced, woven.before)
    return woven


def _listing(course: Course, match: re.Match[str]) -> str:
    indent, anchor = match["indent"], match["anchor"]
    code = listing(course.root, anchor, bool(match["signature"]))
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", code)), 3)
    suffix = Path(anchor.partition("#")[0]).suffix
    block = [fence + {".py": "python"}.get(suffix, suffix[1:]), *code.split("\n"), fence]
    return "\n".join([match["marker"], *(f"{indent}{line}" if line else "" for line in block)])


def _given_away(course: Course, anchor: str, hidden: Sequence[Exercise]) -> list[str]:
    """A problem for each exercise with code in what the anchor names."""
    its = [exercise for exercise in hidden if exercise.file == anchor.partition("#")[0]]
    text, spans = locate(course.root, anchor) if its else ("", [])
    return [
        f"'{anchor}' shows the answer to exercise {exercise.id}; show its signature"
        for exercise in its
        if any(first < body.last and body.first < last for first, last in spans for body in exercise.bodies(text))
    ]


def _owned(course: Course, path: Path, kind: str, what: str) -> str:
    """The text that belongs to a marker of the document at `path`."""
    if kind == "measured":
        return shown(course.results, what)
    if kind == "answers":
        lines = _answers(course, what)
    elif what.startswith("table "):
        lines = table(course.chapters, path.stem, what.removeprefix("table "))
    elif what in GENERATED:
        lines = GENERATED[what]()
    else:
        raise CourseError(f"nothing generates {what!r}; there is a table NAME, {', '.join(GENERATED)}")
    return "\n".join(["", *lines, ""])


def _answers(course: Course, what: str) -> list[str]:
    """The answers to a chapter's exercises, or to these of them, each folded."""
    exercises = need(course, int(what)) if what.isdecimal() else [find(course, id) for id in what.split()]
    lines: list[str] = []
    for exercise in exercises:
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
