"""The files of the core in reading order, for the map: each comes after those of its part that it imports."""

import ast
import html
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASIDE = {"extras", "support", "lab", "tiny_chat", "cli", "load", "cluster"}  # folders of a phase that are no core
LINES_AN_HOUR, HOURS_AN_EVENING = 600, 3
# Where the reading of a phase begins: what these need comes first, then they, then the rest.
FIRST = ("core", "cache", "decoder", "step.runner", "scheduler", "application", "assemble", "engine_process")


def core_files() -> list[str]:
    """The sums and a folded table for each part: phases 0 to 5, their kernels, the server."""
    *phases, server = sorted(ROOT.glob("phase?_*"))
    files = [file for phase in phases for file in _files(phase)]
    kernels = [file for file in files if "kernels" in file.parts]
    plain = [file for file in files if "kernels" not in file.parts]
    lines = [
        "",
        f"- Phases 0 to 5 without kernels: **{_size(plain)}**.",
        f"- Their kernels, in torch and in Triton: {_size(kernels)}.",
        f"- The core of the server: {_size(_files(server))}.",
    ]
    for phase in phases:
        lines += _table(_about(phase / "__init__.py"), [file for file in plain if phase in file.parents])
    lines += _table("The kernels of phases 1 and 2", kernels)
    lines += _table(_about(server / "__init__.py"), _files(server))
    return lines


def _files(phase: Path) -> list[Path]:
    found = (file for file in phase.rglob("*.py") if not ASIDE & set(file.relative_to(phase).parts))
    return sorted(file for file in found if not file.stem.startswith("__"))


def _size(files: Sequence[Path]) -> str:
    hours = sum(map(_lines, files)) / LINES_AN_HOUR
    evenings = math.ceil(hours / HOURS_AN_EVENING)
    last = f"{hours:.0f} hours: {evenings} evening{'s' * (evenings > 1)}"
    return f"{_about_many(files)} lines in {len(files)} files, {last}"


def _lines(file: Path) -> int:
    return len(file.read_text("utf-8").splitlines())


def _about_many(files: Sequence[Path]) -> str:
    """Lines in tens: so a small change of a file rarely changes the map."""
    return f"{math.ceil(sum(map(_lines, files)) / 10) * 10:,}"


def _table(title: str, files: Sequence[Path]) -> list[str]:
    summary = f"{html.escape(title.rstrip('.'), quote=False)} ({len(files)} files, {_about_many(files)} lines)"
    rows = [
        f"| [{file.stem}](../{file.relative_to(ROOT).as_posix()}) | {_about_many([file])} | {_about(file)} |"
        for file in _in_order(files)
    ]
    head = ["| file | lines | what it is |", "|---|---|---|"]
    return ["", "<details>", f"<summary>{summary}</summary>", "", *head, *rows, "", "</details>"]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def _about(file: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = " ".join((ast.get_docstring(_tree(file)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def _in_order(files: Sequence[Path]) -> list[Path]:
    """Each file after those that it imports when it is loaded."""
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    order: dict[str, None] = {}

    def read(name: str) -> None:
        if name in order:
            return
        for node in _tree(names[name]).body:
            if isinstance(node, ast.ImportFrom):
                imported = (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
                for other in imported:
                    if other in names:
                        read(other)
        order[name] = None

    begin = [name for end in FIRST for name in names if name.endswith(f".{end}")]
    for name in (*begin, *names):
        read(name)
    return [names[name] for name in order]
