"""Predict, then see: a reader commits to a number before a notebook's next cell, or a figure of a chapter, shows it.

In a chapter it stands before a question, and before what answers it, which is folded:

    <!-- guess: stall.json#outcomes.chunk_256.worst_gap_ms ,.0f ms -->
    **Guess:** how long is the longest gap between two tokens, in ms?

    <details>
    <summary>What was measured</summary>

    ![Gaps](figures/stall.svg)

    </details>

The first line names the figure of a result, its format and its unit. In the book the reader types a number, the figure
unfolds, and the end of the chapter says how many guesses were close.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from chapters.claims import figures

_MARK = r"<!-- guess: (?P<key>(?P<file>[\w-]+\.json)#(?P<name>\S+)) (?P<form>\S+)(?: (?P<unit>[^>]+?))? -->"
MARK = re.compile(_MARK)
_ASKED = re.compile(
    rf"^{_MARK}\n(?P<question>(?:[^\n]+\n)+)\n<details>\n<summary>[^\n]+</summary>\n(?P<folded>.*?)^</details>$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Prediction:
    """A number that was guessed; None without a guess."""

    value: float | None

    def compare(self, found: float, unit: str = "") -> None:
        """Print the guess beside what was found. Nothing without a guess: the cell shows what was found anyway."""
        if self.value is None:
            return
        said, truth = (f"{number:,.4g} {unit}".rstrip() for number in (self.value, found))
        times = f", {self.value / found:.2g} times as much" if found else ""
        print(f"It is {truth}. You said {said}{times}.")


def guess(question: str) -> Prediction:
    """Ask for a number. An empty answer, or a notebook that is executed without a reader, is no guess."""
    try:
        given = input(f"{question} (a number, or Enter) ")
        return Prediction(float(given.replace(",", "")) if given.strip() else None)
    except (EOFError, RuntimeError, ValueError):  # RuntimeError: a kernel without a front end to ask
        return Prediction(None)


@dataclass(frozen=True)
class Asked:
    """A guess that a chapter asks for: what was measured as a number and a text, the question, and what is folded."""

    key: str
    number: float
    shown: str
    question: str = ""
    folded: str = ""
    above: str = ""

    @classmethod
    def of(cls, match: re.Match[str], results: Path, text: str = "") -> Asked:
        """What a mark, or a mark with all that follows it, says. ClaimError if there is no such figure."""
        (value,) = figures(results / match["file"], match["name"])[:1]
        shown = format(value, match["form"])
        number = float(shown.replace(",", "").rstrip("%"))
        parts = {name: each for name, each in match.groupdict().items() if name in ("question", "folded")}
        shown = f"{shown} {match['unit'] or ''}".rstrip()
        return cls(match["key"], number, shown, above=text[: match.start()], **parts)


def asked(text: str, results: Path) -> list[Asked]:
    """The guesses that the text of a chapter asks for."""
    return [Asked.of(match, results, text) for match in _ASKED.finditer(text)]
