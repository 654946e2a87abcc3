"""Predict, then run: a reader of a notebook commits to a number before the next cell shows it."""

from __future__ import annotations

from dataclasses import dataclass


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
