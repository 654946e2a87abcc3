"""The page of pinned lines in other engines: whether each line still holds the name that the page gives it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

PAGE = Path(__file__).parent / "elsewhere.md"
PINNED = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/blob/(v[\d.]+|[0-9a-f]{9,40})/(\S+)#L(\d+)")


@dataclass(frozen=True)
class Line:
    """A line of another engine. `name` stands on it; the other texts of links describe what is there."""

    text: str
    repository: str
    revision: str
    path: str
    number: int

    @property
    def name(self) -> str | None:
        return self.text.strip("`") if self.text.startswith("`") else None

    @property
    def raw(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.revision}/{self.path}"


def lines(page: str) -> Iterator[Line]:
    """The pinned lines of a page, in the order of its links. ValueError for a link that is not pinned to a line."""
    targets = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", page, re.MULTILINE))
    for text, label in re.findall(r"\[([^\[\]]+)\]\[([\w-]+)\]", page):
        match = PINNED.fullmatch(targets[label])
        if match is None:
            raise ValueError(f"{label} is not pinned to a line of a release or a commit: {targets[label]}")
        yield Line(text, match[1], match[2], match[3], int(match[4]))


def download(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode("utf-8")
        return text


def moved(page: str, read: Callable[[str], str] = download) -> list[str]:
    """The lines that do not hold their name, each with what stands there."""
    texts: dict[str, list[str]] = {}
    wrong = []
    for line in lines(page):
        if line.raw not in texts:
            texts[line.raw] = read(line.raw).split("\n")
        rows = texts[line.raw]
        found = rows[line.number - 1] if line.number <= len(rows) else ""
        if not found.strip() or (line.name and line.name not in found):
            wrong.append(f"{line.path}:{line.number} should be {line.text}: {found.strip()!r}")
    return wrong
