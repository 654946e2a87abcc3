"""The paths of the course: phases, tests, chapters, workspace."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Compiled kernels, in folders named by a hash of their sources: a copy of the checkout uses those of the checkout.
COMPILED = "phase2_prefill_decode/extras/cpu/__pycache__"


class CourseError(Exception):
    """A mistake that the user can correct. The message says what was given and what is allowed."""


@dataclass(frozen=True)
class Phase:
    """A phase: its number and its package, for example 0 and `phase0_request`."""

    number: int
    package: str


@dataclass(frozen=True)
class Course:
    """The paths under one root. Nothing is read until it is needed."""

    root: Path

    @classmethod
    def here(cls) -> Course:
        """The course of the `chapters` package that is running."""
        return cls(Path(__file__).resolve().parent.parent)

    @property
    def chapters(self) -> Path:
        return self.root / "chapters"

    @property
    def results(self) -> Path:
        return self.chapters / "results"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def private(self) -> Path:
        """The tool's own state, outside the workspace so that it survives it."""
        return self.root / ".course"

    def need_checkout(self, command: str) -> None:
        if not ((self.root / "pyproject.toml").is_file() and (self.root / "tests").is_dir()):
            raise CourseError(
                f"`{command}` needs the checkout: its tests and chapters are not part of the installed package. "
                "Clone the repository and run `python -m chapters` in its root."
            )

    def phases(self) -> tuple[Phase, ...]:
        found = [
            Phase(int(match[1]), path.name)
            for path in self.root.glob("phase*_*")
            if path.is_dir() and (match := re.fullmatch(r"phase(\d+)_\w+", path.name))
        ]
        return tuple(sorted(found, key=lambda phase: phase.number))

    def phase(self, number: int) -> Phase:
        for phase in self.phases():
            if phase.number == number:
                return phase
        known = ", ".join(str(phase.number) for phase in self.phases()) or "none"
        raise CourseError(f"there is no phase {number}; the phases are: {known}")

    def chapters_with(self, kind: str) -> tuple[int, ...]:
        """The chapters that have a file of this kind: `exercises`, `bugs` or `quiz`."""
        return tuple(sorted(int(path.name[:2]) for path in self.chapters.glob(f"[0-9][0-9]_{kind}.toml")))

    def tables(self, chapter: int, kind: str, key: str, make: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
        """What `make` makes of each table `[[key]]` of this chapter's file; nothing if there is no file."""
        path = self.chapters / f"{chapter:02d}_{kind}.toml"
        try:
            known = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            return tuple(make(table) for table in known.get(key, ()))
        except (tomllib.TOMLDecodeError, TypeError, ValueError, KeyError, OSError, CourseError) as error:
            raise CourseError(f"{self.name(path)}: {error}") from None

    def has_none(self, chapter: int, kind: str, what: str) -> CourseError:
        known = ", ".join(map(str, self.chapters_with(kind))) or "none"
        return CourseError(f"chapter {chapter} has no {what}; chapters that have some: {known}")

    def documents(self) -> tuple[Path, ...]:
        """The Markdown files that are woven: the README and the chapters."""
        readme = self.root / "README.md"
        return (*([readme] if readme.is_file() else []), *sorted(self.chapters.glob("*.md")))

    def notebooks(self) -> tuple[Path, ...]:
        return tuple(sorted(self.chapters.glob("*.ipynb")))

    def sources(self) -> tuple[Path, ...]:
        return tuple(path for phase in self.phases() for path in sorted((self.root / phase.package).rglob("*.py")))

    def name(self, path: Path) -> str:
        """A path relative to the root."""
        return path.relative_to(self.root).as_posix()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)
