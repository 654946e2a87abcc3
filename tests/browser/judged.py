"""What `python -m chapters check` says of answers to exercises: blank, right and wrong. The course's Python runs this,
with the numbers of exercises; it prints a list in JSON."""

import json
import sys
import tempfile
from pathlib import Path

from chapters.checking import judge
from chapters.course import Course
from chapters.exercises import blanked, find
from chapters.testing import copy_checkout


def main(ids: list[str]) -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        course = Course(copy_checkout(Course.here(), Path(folder, "checkout"), {}))
        for exercise in (find(course, id) for id in ids):
            right, blank = (course.root / exercise.file).read_text("utf-8"), blanked(course, exercise.file, [exercise])
            answers = {"blank": blank, "right": right, "wrong": blank.replace(exercise.error, "return None")}
            for kind, text in answers.items():
                path = course.workspace / exercise.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
                judged = judge(course, exercise, 60)
                line = judged.failure.line if judged.failure else ""
                told = {"status": judged.status, "note": judged.note, "line": line}
                found.append({"id": exercise.id, "kind": kind, "text": text, "told": told})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
