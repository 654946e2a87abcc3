"""What the prose tells a reader to type, and the exercises that it names, checked against what there is.

A command is a code span, or a line of a block of bash: `python -m chapters ...`, or what stands for it (`check 0.1`);
`nanoserve ...`; `make ...`. An exercise is a number after that word, and every number in a section "Exercises" or
"Answers". There a row of a table also names the code that is to be written. A planted bug is an id after the word bug.
The pages of a chapter name its exercises in the order of their numbers.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from chapters import bugs, exercises
from chapters.attribution import misattributed
from chapters.cli import make_parser
from chapters.course import Course, CourseError
from chapters.exercises import Exercise
from chapters.plan import PAGES
from chapters.source import locate

ID = re.compile(r"(?<![\w.])\d{1,2}\.\d{1,2}(?![\w.]\w|\w)")
SHORT = re.compile(r"(start|check|watch|run|hint|solution|break|quiz) (\d|N)\S*( -.*)?")
PLACED = re.compile(r"(?:\b(?:[Ee]xercise|[Pp]uzzle)s?\**\s+\**|\*\*|^\| )(\d+\.\d+)\b", re.MULTILINE)
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
STANDS_FOR = {"N": "0", "N.M": "0.1"}


def unknown(course: Course, path: Path) -> list[str]:
    """What is wrong with the commands and exercises that the text of a file names."""
    text = path.read_text("utf-8") if path.suffix != ".ipynb" else _markdown(path)
    prose = re.sub(r"<details>.*?</details>|<!--.*?-->", "", FENCED.sub("", text), flags=re.DOTALL)
    found = [f"`{line}`: {fault}" for line in commands(text) if (fault := _wrong(course, line))]
    found += [f"there is no exercise {id}" for id in _named(prose) if id not in _exercises(course)]
    known = {bug.id for bug in bugs.every(course)}
    found += [f"there is no bug {id}" for id in re.findall(r"\b[Bb]ug\s+(\d+[a-z])\b", prose) if id not in known]
    for row in re.findall(r"^\| \d+\.\d+ \|.*", _sections(prose), re.MULTILINE):
        found += _wrong_row(course, row)
    found += misattributed(course, re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL), _exercises(course))
    chapters = {int(page.name[:2]) for page in course.chapters.glob("[0-9][0-9]_*.md")}
    named = re.findall(r"(?<!no )\b[Cc]hapters? (\d+)(?:,? (?:to|and) (\d+))?", prose)
    found += [
        f"there is no chapter {number}" for pair in named for number in pair if number and int(number) not in chapters
    ]
    return found


def order(course: Course, chapter: int) -> list[str]:
    """The exercises of a chapter in the order in which its pages first name them, after their heads."""
    pages = (page.path.read_text("utf-8") for page in PAGES if page.name.startswith(f"{chapter:02d}_"))
    text = "\n".join(FENCED.sub("", page.partition("\n## Answers\n")[0]).partition("\n## ")[2] for page in pages)
    known = {each.id for each in exercises.load(course, chapter)}
    return [id for id in dict.fromkeys(PLACED.findall(text)) if id in known]


def _markdown(notebook: Path) -> str:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def commands(text: str) -> Iterator[str]:
    """What the text tells a reader to type, without comments."""
    for language, block in FENCED.findall(text):
        for line in block.split("\n") if language in ("bash", "sh") else ():
            for part in re.split(r" && | \| ", re.sub(r"\s+# .*", "", line).strip()):
                yield part.rstrip(" &")
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text)):
        yield " ".join(span.split())


def _wrong(course: Course, line: str) -> str:
    """Why a reader cannot type this line; nothing if it is right, or no command."""
    if SHORT.fullmatch(line):
        line = f"python -m chapters {line}"
    line = line.replace("python -m phase6_integration.cli", "nanoserve")
    if module := re.match(r"python -m (phase\d_\w+(?:\.\w+)*)(.*)$", line):
        return _wrong_module(module[1], shlex.split(re.sub(r"[<>\[].*", "", module[2])))
    match = re.match(r"(?:\S+/)?(python -m chapters|nanoserve|make) ([^<>]+)$", line)
    if match is None:
        return ""
    program, (first, *rest) = match[1], match[2].split()
    if program == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (course.root / "Makefile").read_text(), re.MULTILINE)
        missing = [word for word in (first, *rest) if "=" not in word and word not in targets]
        return f"the Makefile has no {', '.join(missing)}" if missing else ""
    return _wrong_server(first, rest) if program == "nanoserve" else _wrong_course(course, [first, *rest])


def _wrong_server(name: str, rest: list[str]) -> str:
    """Why `nanoserve` does not take these words: the command, or a flag of it."""
    from phase0_request.support.flags import Parser
    from phase6_integration.cli.main import BENCHES, COMMANDS

    if name.startswith("-") or name == "help" or (name == "bench" and rest[:1] and rest[0] in BENCHES):
        return ""
    if name not in COMMANDS:
        return f"the commands are {', '.join(COMMANDS)}"
    parser = Parser(prog="nanoserve")
    import_module(COMMANDS[name][0]).add_flags(parser)
    flags = [flag.partition("=")[0] for flag in rest if flag.startswith("--")]
    missing = [flag for flag in flags if flag not in parser._option_string_actions]
    return f"{name} has no flag {', '.join(missing)}" if missing else ""


class _ParsedError(Exception):
    """The arguments were right."""


def _wrong_module(package: str, words: list[str]) -> str:
    """Why a phase, a lab or the server does not take these words."""
    told, parse = io.StringIO(), argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse(parser, *given)
        raise _ParsedError

    try:
        (main, arguments) = _entry(package)
        module, _, function = main.partition(":")
        with (
            contextlib.redirect_stderr(told),
            contextlib.redirect_stdout(told),
            mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        ):
            getattr(import_module(module), function)(*arguments, words)
    except _ParsedError:
        return ""
    except SystemExit as end:
        return told.getvalue().strip().split("\n")[-1] if end.code else ""
    except ImportError as error:
        return str(error)
    return ""


def _entry(package: str) -> tuple[str, list[str]]:
    """What `python -m package` calls, and with what before the words of the command line."""
    path = Course.here().root.joinpath(*package.split("."), "__main__.py")
    if not path.is_file():
        raise ImportError(f"there is no program {package}")
    main, *more = re.findall(r'"([^"]+)"', re.findall(r"^run\((.*)\)$", path.read_text("utf-8"), re.MULTILINE)[0])
    return main, more


def _wrong_course(course: Course, words: list[str]) -> str:
    """Why `python -m chapters` does not take these words, or the exercise, the bug or the chapter that they name."""
    words = [STANDS_FOR.get(word, word) for word in words]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            given = make_parser().parse_args(words if words[0] != "mine" else words[:1])
        for name in ("exercise", "target"):
            if "." in (id := getattr(given, name, None) or ""):
                exercises.find(course, id)
        if getattr(given, "bug", None):
            bugs.choose(course, given.bug)
        if given.command == "quiz" and not (course.chapters / f"{given.chapter:02d}_quiz.toml").exists():
            return f"there is no quiz {given.chapter}"
        if given.command == "start":
            exercises.need(course, given.chapter)
        if given.command == "run":
            course.phase(given.phase)
    except SystemExit:
        return told.getvalue().strip().split("\n")[-1]
    except CourseError as error:
        return str(error)
    return ""


def _sections(prose: str) -> str:
    """The sections about exercises."""
    return "\n".join(re.findall(r"^##+ (?:Exercises|Answers)\n(.*?)(?=^##|\Z)", prose, re.MULTILINE | re.DOTALL))


def _named(prose: str) -> list[str]:
    after = re.findall(r"\b[Ee]xercises?\**\s+\**(\d+\.\d+)", prose)
    return [*after, *ID.findall(_sections(prose))]


@cache
def _exercises(course: Course) -> dict[str, Exercise]:
    return {each.id: each for each in exercises.every(course)}


def _wrong_row(course: Course, row: str) -> Iterator[str]:
    """What a row of exercises says wrongly of where the code is: `path.py`, `Class.method`, `other method`."""
    id = row.split()[1]
    if (exercise := _exercises(course).get(id)) is None:
        return
    spans = [(body.first, body.last) for body in exercise.bodies((course.root / exercise.file).read_text("utf-8"))]
    holder = ""
    for name in re.findall(r"`([^`]+)`", row):
        if name.endswith(".py"):
            if not f"/{exercise.file}".endswith(f"/{name}"):
                yield f"exercise {id} is in {exercise.file}, not in {name}"
                return
            continue
        holder = name.rpartition(".")[0] or holder
        try:
            where = _definition(course, exercise.file, holder, name.rpartition(".")[2])
        except CourseError as error:
            yield f"exercise {id}: {error}"
            continue
        if not any(first < end and start < last for first, last in where for start, end in spans):
            yield f"`{name}` is not in exercise {id}"


def _definition(course: Course, file: str, holder: str, name: str) -> list[tuple[int, int]]:
    """Where a function, class or method of the file is."""
    try:
        return locate(course.root, f"{file}#{holder}.{name}" if holder else f"{file}#{name}")[1]
    except CourseError:
        return locate(course.root, f"{file}#{name}")[1]
