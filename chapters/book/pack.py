"""Packs what the book's pages run, beside them: `python -m chapters.book.pack FOLDER`.

    npm/            Pyodide and CodeMirror, as package-lock.json names them, each checked against its hash
    libraries.zip   the pure Python libraries that the tests need, from this environment, and Hypothesis for a browser
    course.json     the exercises that need no tensors, and the quick questions
    course.zip      phases 0 to 5, their tests, the course's checker
    model/          the bundled model
    viewer/         the viewer of records; sources.json: the lines of source that it shows; tour.js: the page's tour
    ../llms.txt     the pages of the book, for language models
    scenes/         the run that each scene begins with

A page loads nothing from anywhere else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

from chapters.book.tab.scenes import play
from chapters.course import Course
from chapters.exercises import blanked, load
from chapters.quiz import load as quiz
from chapters.workspace import by_file
from phase5_continuous.extras.record.record_file import encoded
from phase6_integration.extras.page.sources import sources

ROOT = Path(__file__).resolve().parent.parent.parent
BOOK = Path(__file__).parent
REGISTRY = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org")
CACHE = ROOT / "build" / "fetched"
LIBRARIES = ("hypothesis", "iniconfig", "packaging", "pluggy", "pygments", "pytest", "rich", "sortedcontainers")
# The exercises whose tests need neither torch nor numpy.
CHAPTERS = {0: range(1, 8), 1: range(1, 4), 3: range(1, 5), 4: range(1, 11), 5: range(1, 7), 11: range(2, 7)}
IN_TAB = {f"{chapter}.{n}" for chapter, numbers in CHAPTERS.items() for n in numbers}
OTHERS = [f"chapters/{name}.md" for name in ("map", "glossary", "elsewhere", "reference", "operating", "results")]
UNUSED = ("ws", "@types/emscripten")  # which Pyodide names for other uses
LEXERS = ("__init__", "_mapping", "diff", "python")  # of the hundreds that Pygments has
PLATFORM = ("--platform=pyemscripten_2026_0_wasm32", "--python-version=3.14", "--implementation=cp")  # of Pyodide
PHASES = "phase[0-5]_*/"
COURSE = [
    f"{PHASES}**/*.py",
    f"{PHASES}*.pyi",
    "chapters/*.py",
    "chapters/*.toml",
    "chapters/book/__init__.py",
    "chapters/book/tab/*.py",
]
TESTS = ["tests/*.py", *(f"tests/{PHASES}{each}*.py" for each in ("", "lab/"))]
PAGE = ROOT / "phase6_integration/extras/page/static"
PARTS = ("dom.js", "first.js", "tour.js")  # of the page
MODEL = Path("phase0_request", "tiny_chat")


def pack(site: Path) -> None:
    tab = site / "tab"
    pack_engine(tab, packages())
    (tab / "scenes").mkdir()
    for name, record in scenes():
        (tab / "scenes" / f"{name}.jsonl").write_bytes(record)
    (tab / "course.json").write_text(json.dumps(described()), "utf-8")
    write(tab / "libraries.zip", libraries())
    (site / "llms.txt").write_text(llms(), "utf-8")


def pack_engine(tab: Path, packages: Iterable[tuple[str, Path]]) -> None:
    """What the engine in a tab needs: Python, the phases, the model and the viewer."""
    shutil.rmtree(tab, ignore_errors=True)
    (tab / "model").mkdir(parents=True)
    for name, folder in packages:
        shutil.copytree(folder, tab / "npm" / name, ignore=shutil.ignore_patterns("*.map", "*.ts", "*.cjs", "*.html"))
    shutil.copytree(PAGE / "viewer", tab / "viewer", ignore=shutil.ignore_patterns("replay.*"))
    for name in PARTS:
        shutil.copy(PAGE / name, tab)
    shutil.copy(ROOT / MODEL / "model.safetensors", tab / "model")
    (tab / "sources.json").write_text(json.dumps(sources()), "utf-8")
    write(tab / "course.zip", course())


def llms() -> str:
    """The pages of the book, as https://llmstxt.org describes: each with its title and the beginning of its text."""
    lines = [
        "# nano-serving",
        "",
        "> An LLM serving engine, built in seven phases: the book of its code.",
        "",
        "## Pages",
        "",
    ]
    for page in [ROOT / "chapters/index.md", *sorted(ROOT.glob("chapters/[0-9]*.md")), *map(ROOT.joinpath, OTHERS)]:
        text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
        title, *paragraphs = (each.strip() for each in text.split("\n\n") if each.strip())
        first = next(each for each in paragraphs if re.match(r"[A-Z*`]", each))
        about = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(first.split()))
        path = page.relative_to(ROOT).with_suffix(".html").as_posix()
        lines.append(f"- [{title.lstrip('# ')}]({path}): {about.partition('. ')[0].rstrip('.')}.")
    return "\n".join(lines) + "\n"


def scenes() -> Iterator[tuple[str, bytes]]:
    """The name of each scene, and the run that it begins with."""
    _, _, table = (BOOK / "static/tab/scenes.js").read_text("utf-8").partition("SCENES = ")
    for name, scene in json.loads(table.strip().removesuffix(";")).items():
        if "rest" in scene:
            yield name, b"".join(encoded(line).encode() + b"\n" for line in play(scene["rest"] | scene["set"]))
        else:
            yield name, gzip.decompress((ROOT / "tests/data/record.jsonl.gz").read_bytes())


def packages(*names: str) -> Iterator[tuple[str, Path]]:
    """The npm packages of the lock file, or those of these names: the name of each, and the folder with its files."""
    locked = json.loads((BOOK / "package-lock.json").read_text("utf-8"))["packages"]
    for path, package in locked.items():
        name = path.removeprefix("node_modules/")
        if name and name not in UNUSED and (not names or name in names):
            folder = CACHE / f"{name}-{package['version']}"
            if not folder.exists():
                file = f"{name}/-/{name.rpartition('/')[2]}-{package['version']}.tgz"
                unpack(download(file, package["integrity"]), folder)
            yield name, folder


def download(file: str, integrity: str) -> bytes:
    try:
        with urllib.request.urlopen(f"{REGISTRY.rstrip('/')}/{file}", timeout=300) as answer:
            data: bytes = answer.read()
    except OSError as error:
        raise SystemExit(f"error: {file}, which the book's pages run, cannot be had from {REGISTRY}: {error}") from None
    kind, _, expected = integrity.partition("-")
    if base64.b64encode(hashlib.new(kind, data).digest()).decode() != expected:
        raise SystemExit(f"error: {file} is not the file that package-lock.json names")
    return data


def unpack(data: bytes, folder: Path) -> None:
    part = folder.with_name(f"{folder.name}.part")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part, filter="data")
    (inner,) = part.iterdir()
    inner.rename(folder)
    part.rmdir()


def described() -> dict[str, Any]:
    """What the page of exercises shows before it runs any Python."""
    course = Course(ROOT)
    chapters: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    for chapter in CHAPTERS:
        known = load(course, chapter)
        chosen = [asdict(exercise) for exercise in known if exercise.id in IN_TAB]
        files |= {file: blanked(course, file, its) for file, its in by_file(known).items()}
        (page,) = ROOT.glob(f"chapters/{chapter:02d}_*.md")
        title = page.read_text("utf-8").split("\n")[0].lstrip("# ")
        asked = [asdict(question) for question in quiz(course, chapter)]
        chapters.append({"number": chapter, "title": title, "exercises": chosen, "quiz": asked})
    return {"chapters": chapters, "files": files}


def course() -> Iterator[tuple[str, bytes]]:
    yield "pyproject.toml", (ROOT / "pyproject.toml").read_bytes()
    yield "tokenizers.py", (BOOK / "tab" / "tokenizers.py").read_bytes()
    for pattern in (*COURSE, *TESTS, f"{MODEL}/*.json", f"{MODEL}/*.jinja"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT).as_posix(), path.read_bytes()


def libraries() -> Iterator[tuple[str, bytes]]:
    for name in LIBRARIES:
        for file in files(name) or ():
            lexer = file.parent.name == "lexers" and file.stem not in LEXERS
            if (file.suffix == ".py" and not lexer) or file.parent.suffix == ".dist-info":
                yield file.as_posix(), Path(str(file.locate())).read_bytes()
    with zipfile.ZipFile(hypothesis()) as wheel:
        for member in wheel.namelist():
            if member.endswith(".so"):
                yield member, wheel.read(member)


def hypothesis() -> Path:
    """The wheel of the installed Hypothesis for Pyodide: a part of it is compiled."""
    installed = f"hypothesis=={version('hypothesis')}"
    wanted = f"{installed.replace('==', '-')}-*wasm32.whl"
    if not list(CACHE.glob(wanted)):
        CACHE.mkdir(parents=True, exist_ok=True)
        pins = (ROOT / ".ci/constraints.txt").read_text("utf-8")
        pinned = re.search(rf"^{re.escape(installed)} (?:.*\\\n)+.*\n", pins, re.MULTILINE)
        (CACHE / "hypothesis.txt").write_text(pinned[0] if pinned else installed)  # with hashes, or as it is
        command = f"-m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --dest {CACHE}"
        subprocess.run([sys.executable, *command.split(), *PLATFORM, "-r", str(CACHE / "hypothesis.txt")], check=True)
    (wheel,) = CACHE.glob(wanted)
    return wheel


def write(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
