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
    """Have the module of a file run as if this were its source. What was imported from it has the other code too.
    Some function must differ: what a module does when it is imported stays as it is."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    codes = defaultdict[str, list[CodeType]](list)  # getter and setter of a property have one name
    for code in _codes(compile(text, str(ROOT / file), "exec")):
        codes[code.co_qualname].append(code)
    changed = {function: function.__code__ for function in _functions(module) if function.__code__.co_qualname in codes}
    others = {function: codes[code.co_qualname].pop(0) for function, code in changed.items()}
    assert any(_does(code) != _does(others[function]) for function, code in changed.items()), f"{file}: all is the same"
    try:
        for function, code in others.items():
            function.__code__ = code
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


def _does(code: CodeType) -> tuple[Any, ...]:
    """What a code does, wherever its lines are."""
    constants = [_does(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _functions(module: Any) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, in the order of its source."""
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for each in members if getattr(value, "__module__", None) == module.__name__ else ():
            inner = [each.fget, each.fset] if isinstance(each, property) else [getattr(each, "__func__", each)]
            yield from (one for one in inner if isinstance(one, FunctionType) and one.__module__ == module.__name__)
