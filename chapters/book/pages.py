"""What the book knows of its pages: their order, and the terms of the glossary, read from glossary.md."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parent.parent

# Groups of the table of contents. A chapter's notebooks are listed below it; what is in no group is in the last.
CONTENTS = {
    "Start here": ("plan", "map", "glossary"),
    "Chapters": ("0?_*", "capstone"),
    "On a GPU": ("colab-notebook",),
    "The server": (
        "reference",
        "results",
        "The landing page </README>",
        "/SECURITY",
        "/CONTRIBUTING",
        "The bundled model </phase0_request/tiny_chat/README>",
    ),
    "More": ("*",),
}

# Terms that are plain English too, so that a first occurrence says little about its meaning.
PLAIN = {
    *(
        "abort",
        "attach",
        "attention",
        "block",
        "computed",
        "drain",
        "greedy",
        "here",
        "iteration",
        "lab",
        "lock",
        "phase",
    ),
    *("publish", "region", "request", "running", "sequence", "step", "token", "weave"),
}


@dataclass(frozen=True)
class Term:
    """A row of the glossary: the names of one thing, and what it is."""

    names: tuple[str, ...]
    meaning: str

    @property
    def anchor(self) -> str:
        return "term-" + re.sub(r"\W+", "-", self.names[0].lower())

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Finds its names in prose, in singular and plural. None if all of them are plain English."""
        names = [re.escape(name) + "s?" for name in self.names if name not in PLAIN]
        case = re.NOFLAG if self.names[0].isupper() else re.IGNORECASE
        return re.compile(rf"(?<![\w`-])(?:{'|'.join(names)})(?![\w-])", case) if names else None


def terms(page: Path = CHAPTERS / "glossary.md") -> list[Term]:
    """The terms of the glossary, in its order."""
    rows = re.findall(r"^\| \*\*(.+?)\*\*(.*?) \| (.+?) \|", page.read_text("utf-8"), re.MULTILINE)
    return [
        Term(
            (first, *(re.sub(r"\*\*", "", name).strip() for name in others.split(",") if name.strip())), plain(meaning)
        )
        for first, others, meaning in rows
    ]


def plain(markdown: str) -> str:
    """The text of a line of Markdown."""
    return re.sub(r"[`*]", "", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown))


def contents() -> list[tuple[str, list[str]]]:
    """The titles of the groups and the pages in them."""
    left = sorted([path.stem for path in CHAPTERS.glob("*.md")] + ["colab-notebook"])
    left = [page for page in left if page != "index" and "_appendix" not in page]
    groups = []
    for title, patterns in CONTENTS.items():
        pages = [
            page for pattern in patterns for page in ([pattern] if "/" in pattern else fnmatch.filter(left, pattern))
        ]
        left = [page for page in left if page not in pages]
        groups.append((title, pages))
    return [(title, pages) for title, pages in groups if pages]


def below(docname: str) -> list[str]:
    """The pages that belong to a chapter: its appendices and its notebooks, which begin with its number."""
    number = re.match(r"chapters/(\d\d)_(?!appendix|.*-notebook)", docname)
    if number is None:
        return []
    appendices = [path.stem for path in sorted(CHAPTERS.glob(f"{number[1]}_appendix*.md"))]
    return [*appendices, *(f"{path.stem}-notebook" for path in sorted(CHAPTERS.glob(f"{number[1]}_*.ipynb")))]
