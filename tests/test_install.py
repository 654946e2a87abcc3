"""What a deployer gets: a wheel that brings everything it needs and runs outside the checkout."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_house import engine, reachable

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the backend that is installed and unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *command], cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=120
    )


def test_it_holds_the_phases_and_neither_the_course_nor_its_notebooks(installed: Path) -> None:
    packages = {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")}
    phases = {p.name for p in ROOT.glob("phase?_*")}
    assert len(phases) == 7
    assert packages == phases
    assert not list(installed.rglob("*.ipynb"))
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_the_command_answers_outside_the_checkout(installed: Path) -> None:
    """The bundled model travels in the wheel."""
    entry = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "nanoserve = phase6_integration.cli:main" in entry
    program = (
        "import sys, phase0_request, phase6_integration.cli as c; print(c.__file__)\n"
        "assert phase0_request.Tokenizer.from_pretrained().eos_ids; sys.exit(c.main())"
    )
    done = run(installed, "-c", program, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "serve" in done.stdout
    assert all((package / "py.typed").is_file() for package in installed.glob("phase*"))


def test_it_holds_the_engine_and_of_the_labs_what_the_commands_import(installed: Path) -> None:
    """Nothing more: demos, studies, corpora and training run from a checkout."""
    needed = reachable((name for name in engine() if not is_a_demo(name)), labs=True)
    held = {file.relative_to(installed).with_suffix("") for file in installed.rglob("*.py")}
    assert {".".join(file.parts).removesuffix(".__init__") for file in held} == needed
    data = {file.suffix for file in installed.glob("phase*/**/*") if file.is_file() and "tiny_chat" not in file.parts}
    assert data <= {".py", ".pyi", ".typed", ".html", ".js", ".css", ".svg", ".sh", ".pyc", ".jsonl"}
    assert list(installed.glob("phase0_request/tiny_chat/model.safetensors"))


def is_a_demo(name: str) -> bool:
    return name.count(".") == 1 and name.endswith(".__main__")


def test_the_page_of_the_package_index_has_no_link_into_the_repository(installed: Path) -> None:
    head, _, page = next(installed.glob("*.dist-info/METADATA")).read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert len(page) > 500
    assert [target for target in re.findall(r"\]\(([^)]*)\)", page) if "://" not in target] == []


# The pins.


def pins(name: str) -> dict[str, set[str]]:
    """The hashes of each line of a file of pins: a name, a version, a marker."""
    text = (ROOT / ".ci" / name).read_text().replace("\\\n", "")
    lines = [line.split("--hash=") for line in text.splitlines() if not line.startswith("#")]
    return {line.strip(): {one.strip() for one in hashes} for line, *hashes in lines}


def test_every_pin_has_hashes_and_the_server_and_the_book_have_those_of_the_course() -> None:
    every, server, book = pins("constraints.txt"), pins("serve.txt"), pins("book.txt")
    assert all(hashes and all(one.startswith("sha256:") for one in hashes) for hashes in (every | book).values())
    versions = {line.partition(" ")[0] for line in every}
    assert {line.partition(" ")[0] for line in server} <= versions
    for others in (server, book):
        assert all(hashes == every[line] for line, hashes in others.items() if line in every)
    clients = pins("clients.txt") | pins("routers.txt") | pins("browser.txt")
    assert all(hashes and all(one.startswith("sha256:") for one in hashes) for hashes in clients.values())
    assert not any("://" in line for line in every | server | book | clients), "no file names an index"


def test_the_dev_container_installs_with_the_makefile() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    done = subprocess.run(
        [*container["postCreateCommand"].split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert container["remoteEnv"]["PATH"].startswith("${containerWorkspaceFolder}/.venv/bin:")


# The Makefile's choice of torch.


def install_torch(python: str, environment: Path, choice: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": python, "VENV": str(environment)}
    script = ["sh", str(ROOT / ".ci/install_torch.sh"), choice]
    return subprocess.run(script, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An environment as an interrupted installation leaves it: Python is there, pip is not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv"


@pytest.mark.slow  # installs pip
def test_torch_system_is_the_torch_that_is_there(empty: Path) -> None:
    done = install_torch(sys.executable, empty, "system")
    assert done.returncode == 0, done.stderr
    where = "from importlib.metadata import distribution as d; print(d('torch').version, d('torch').locate_file(''))"
    commands = ([each, "-c", where] for each in (sys.executable, str(empty / "bin/python")))
    ours, theirs = (subprocess.run(command, capture_output=True, text=True).stdout.split() for command in commands)
    assert theirs == ours
    assert f"Using torch {ours[0]} " in done.stdout
    assert (empty / "system.txt").read_text() == f"torch=={ours[0]}\n"
    pip = subprocess.run([empty / "bin/python", "-m", "pip", "--version"], capture_output=True)
    assert pip.returncode == 0, "an environment without pip is repaired"


def python(folder: Path, script: str) -> str:
    """A Python that answers as the script says."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("system", "which has none"),
        ("old", "has torch 2.10.0, and 2.11 is the oldest"),  # pip would put a newer one, gigabytes of it, beside it
        ("rocm", "auto, cpu, cuda or system, not"),
    ],
)
def test_a_torch_that_cannot_be_had_is_an_error(empty: Path, tmp_path: Path, choice: str, said: str) -> None:
    (packages,) = empty.glob("lib/python*/site-packages")
    (packages / "pip.py").touch()  # passes for pip: the installation asks for its version, and stops before it uses it
    info = tmp_path / "old" / "torch-2.10.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    old = python(tmp_path, f'PYTHONPATH={info.parent} exec {sys.executable} "$@"')
    given = (old, "system") if choice == "old" else (str(empty / "bin/python"), choice)
    done = install_torch(given[0], empty, given[1])
    assert done.returncode != 0
    assert said in done.stderr


def test_a_python_that_is_too_old_is_named_and_leaves_no_environment(tmp_path: Path) -> None:
    old = python(tmp_path, '[ "$1" = --version ] && echo Python 3.10.13 || exit 1')
    done = install_torch(old, tmp_path / "venv", "auto")
    assert done.returncode == 2
    assert "Python 3.11 to 3.14 is needed" in done.stderr
    assert "3.10.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_another_torch_than_the_installed_one_needs_a_clean_environment(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.torch").write_text("system\n")
    for given, code in (("TORCH=cuda", 2), ("TORCH=system", 0)):
        command = ["make", "-n", "-f", str(ROOT / "Makefile"), "help", given]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert ("run `make clean` before TORCH=cuda" in done.stderr) == (code == 2)


SERVER = """#!/bin/sh
trap 'exit {}' INT
echo ready
while :; do read line; done
"""


@pytest.mark.parametrize(("status", "is_an_error"), [(130, False), (1, True)])
def test_ctrl_c_ends_make_serve_without_an_error_of_make(tmp_path: Path, status: int, is_an_error: bool) -> None:
    """But for one of the server."""
    (tmp_path / "bin").mkdir()
    server = tmp_path / "bin/nanoserve"
    server.write_text(SERVER.format(status))
    server.chmod(0o755)
    for name in (".torch", ".serve"):  # newer than what they are made from
        (tmp_path / name).write_text("cpu\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "serve", f"VENV={tmp_path}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    make = subprocess.Popen(command, cwd=ROOT, env=variables, text=True, start_new_session=True, **pipes)
    assert make.stdout is not None
    assert make.stdout.readline() == "ready\n"
    os.killpg(make.pid, signal.SIGINT)
    _, errors = make.communicate(timeout=60)
    assert ("Error" in errors) == is_an_error, errors
