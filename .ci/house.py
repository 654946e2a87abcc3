"""`make house`: the size of the project. Prints the lines and files of each part, what `nanoserve serve` reaches by its
imports, with the number of classes there, the largest folders, and the rows of the map, a table that is written by
hand.

Lazy imports count, and so do modules that a string names. Lines are those of the files, docstrings included.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVE = "phase6_integration.cli.serve_command"
COMMANDS = "phase6_integration.cli"  # the package, which names every command: it is not followed
MOST_FILES = 16  # of a folder of phase 6
LAYERS = ("engine", "process", "api", "extras", "load", "cli")  # of phase 6


def modules() -> dict[str, Path]:
    """Every Python module of the project by its dotted name."""
    folders = (*ROOT.glob("phase?_*"), ROOT / "chapters", ROOT / "tests", ROOT / ".ci")
    found = {}
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def part_of(name: str) -> str:
    """The part of the project that a module belongs to."""
    top, *inner = name.split(".")
    if inner[:1] == ["tiny_chat"]:
        return "tiny_chat"
    if name.startswith("chapters.tiny_chat"):  # what makes the bundled model
        return "labs"
    if top in ("tests", "chapters"):
        return {"tests": "tests", "chapters": "course"}[top]
    if not top.startswith("phase"):
        return "tools"
    if "lab" in inner[:1]:
        return "labs"
    if top != "phase6_integration":
        return "kernels" if "kernels" in inner else "phases 0 to 5"
    return inner[0] if inner and inner[0] in LAYERS else "phase 6, root"


def named(name: str, known: dict[str, Path]) -> set[str]:
    """The modules that a module imports or names in a string, and the packages that hold it."""
    others = {name.rpartition(".")[0]} if "." in name else set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        match node:
            case ast.Import():
                others |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                others |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Constant(value=str(text)):
                others.add(text.partition(":")[0])
    return others & known.keys()


def reached(start: str, known: dict[str, Path]) -> set[str]:
    """The modules that can be loaded from this one, labs and tests left out."""
    todo, seen = [start], {COMMANDS}
    while todo:
        name = todo.pop()
        if name not in seen and part_of(name) not in ("labs", "tests", "course"):
            seen.add(name)
            todo += named(name, known)
    return seen - {COMMANDS}


def classes(file: Path) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(file.read_text())))


def hops() -> list[str]:
    """The modules that the map names, row by row: its author's choice, and not counted from calls."""
    table = (ROOT / "chapters/map.md").read_text()
    return re.findall(r"^\| \w+ \| \d \| \[(\w+)\]", table, re.MULTILINE)


def main() -> int:
    known = modules()
    lines = {name: len(file.read_text().splitlines()) for name, file in known.items()}
    parts: dict[str, list[int]] = defaultdict(list)
    for name, count in lines.items():
        parts[part_of(name)].append(count)
    print(f"{'part':16}{'lines':>8}{'files':>8}")
    for part, counts in sorted(parts.items(), key=lambda item: -sum(item[1])):
        print(f"{part:16}{sum(counts):8,}{len(counts):8}")
    print(f"{'all Python':16}{sum(lines.values()):8,}{len(lines):8}\n")
    served = reached(SERVE, known)
    by_part: dict[str, int] = defaultdict(int)
    for name in served:
        by_part[part_of(name)] += lines[name]
    count = sum(classes(known[name]) for name in served)
    print(f"reachable from `nanoserve serve`: {sum(by_part.values()):,} lines, {count} classes, {len(served)} files")
    print("  " + ", ".join(f"{part} {count:,}" for part, count in sorted(by_part.items(), key=lambda item: -item[1])))
    folders: dict[Path, int] = defaultdict(int)
    for name, file in known.items():
        if name.startswith("phase") and not file.stem.startswith("__"):
            folders[file.parent.relative_to(ROOT)] += 1
    large = {str(folder): count for folder, count in folders.items() if count > MOST_FILES}
    print(f"folders of the phases with more than {MOST_FILES} files: {large or 'none'}")
    way = hops()
    print(f"rows of the map (chapters/map.md, by hand): {len(way)}, which name {len(set(way))} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
