"""Plants a bug of the course in this process: functions of a module get the code that they would have with it."""

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[3]


def bugs() -> dict[str, dict[str, Any]]:
    """The bugs of the course, by their names."""
    files = sorted((ROOT / "chapters").glob("*_bugs.toml"))
    return {bug["id"]: bug for file in files for bug in tomllib.loads(file.read_text("utf-8"))["bug"]}


@contextmanager
def planted(file: str, text: str) -> Iterator[None]:
    """Have the module of a file run as if this were its source. What was imported from it has the other code too."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    codes = defaultdict[str, list[CodeType]](list)  # getter and setter of a property have one name
    for code in _codes(compile(text, str(ROOT / file), "exec")):
        codes[code.co_qualname].append(code)
    changed = {function: function.__code__ for function in _functions(module) if function.__code__.co_qualname in codes}
    try:
        for function, code in changed.items():
            function.__code__ = codes[code.co_qualname].pop(0)
        yield
    finally:
        for function, code in changed.items():
            function.__code__ = code


@contextmanager
def bug(name: str) -> Iterator[str]:
    """Plant a bug. Yields its title."""
    found = bugs()[name]
    text = (ROOT / found["file"]).read_text("utf-8")
    for edit in found["edit"]:
        assert text.count(edit["before"]) == 1, f"bug {name}: the text to replace is not once in {found['file']}"
        text = text.replace(edit["before"], edit["after"])
    with planted(found["file"], text):
        yield found["title"]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of functions that a module or a class defines."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_class = not inner.co_flags & 2  # CO_NEWLOCALS: functions have it
            yield from _codes(inner) if is_class else [inner]


def _functions(module: Any) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, in the order of its source."""
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for each in members if getattr(value, "__module__", None) == module.__name__ else ():
            inner = [each.fget, each.fset] if isinstance(each, property) else [getattr(each, "__func__", each)]
            yield from (one for one in inner if isinstance(one, FunctionType) and one.__module__ == module.__name__)
