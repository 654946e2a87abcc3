"""Exercises in a tab: the files of the reader, judged by the same tests as `python -m chapters check`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from chapters import unforked
from chapters.checking import judge
from chapters.course import Course
from chapters.exercises import find
from chapters.workspace import solution

COURSE = Course(Path("/course"))
LONGEST = 60.0  # seconds; the page ends a check that takes longer


def check(id: str, text: str, tell: Callable[[str], object]) -> dict[str, object]:
    """Judge an exercise with this text of its file. `tell` gets the name of each test that begins."""
    exercise = find(COURSE, id)
    path = COURSE.workspace / exercise.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    unforked.WATCHERS[:] = [lambda event: tell(event) if isinstance(event, str) else None]
    judged = judge(COURSE, exercise, LONGEST)
    failed = judged.failure
    return {
        "id": id,
        "status": judged.status,
        "note": judged.note,
        "line": failed.line if failed else "",
        "text": failed.text if failed else "",
    }


def answer(id: str) -> str:
    """The reference, as a change to the workspace's file, or to the blank."""
    return "\n".join(solution(COURSE, find(COURSE, id)))


def exported(files: dict[str, str]) -> bytes:
    """The workspace as a zip file, to be unpacked in a checkout."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"workspace/{name}", text)
    return data.getvalue()
