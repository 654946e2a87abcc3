"""Untrusted search path (CWE-426): files in the working directory or in a model's folder must never run as code."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.utils import filter_repo_objects

from phase0_request.tokenizer import BUNDLED
from phase6_integration.engine.hub import PATTERNS
from tests.phase6_integration.life import ENVIRONMENT, ROOT, Life

HERE = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
SCRIPT = "import sys\nfrom phase6_integration.cli import main\nsys.exit(main())\n"  # as an installer writes `nanoserve`
TRAP = "open({sprung!r}, 'a').write(__name__ + ' ')\nraise SystemExit('a trap')\n"
PHASES = {path.name for path in ROOT.glob("phase?_*")}
IMPORTABLE = sys.stdlib_module_names | packages_distributions().keys() | PHASES | {"sitecustomize", "usercustomize"}


def loaded(*command: str) -> set[str]:
    """The top-level modules that a Python has loaded when it runs this program."""
    done = subprocess.run([sys.executable, *command], env=HERE, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def set_traps(folder: Path, names: set[str]) -> None:
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(TRAP.format(sprung=str(folder.parent / "sprung")))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A working directory, and a model's folder."""
    here, model = tmp_path / "here", tmp_path / "model"
    here.mkdir()
    model.mkdir()
    for file in BUNDLED.iterdir():
        (model / file.name).symlink_to(file)
    for folder in (here, model):
        (folder / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path / 'pickles'}\ndisable_jit: 1\n")
    return here, model


def serve(cwd: Path, *command: str) -> Iterator[Life]:
    process = subprocess.Popen(
        [sys.executable, *command, "--port", "0", "--kv-cache-pages", "64"],
        cwd=cwd, env=HERE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    server = Life(process)
    try:
        yield server
    finally:
        process.kill()
        server.close()


def check_an_answer(server: Life) -> None:
    url = server.listening()
    server.until("ready")
    messages = [{"role": "user", "content": "What is a page?"}]
    body = {"messages": messages, "max_tokens": 2}
    assert httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_serve_runs_no_code_from_the_working_directory_or_from_the_model(folders: tuple[Path, Path]) -> None:
    """The engine was started by `python -m`, which puts the working directory first on the path: a `msgspec.py` in a
    model's folder ran with the server's rights. A `.numba_config.yaml` there chose the directory from which compiled
    kernels are unpickled, or turned compilation off, so that the server did not start."""
    here, model = folders
    for folder in (here, model):
        set_traps(folder, set(IMPORTABLE))
    script = here.parent / "nanoserve"
    script.write_text(SCRIPT)
    for server in serve(here, str(script), "serve", str(model)):
        check_an_answer(server)
    assert not (here.parent / "sprung").exists()
    assert not (here.parent / "pickles").exists()


def test_python_m_leaves_the_working_directory_as_soon_as_it_runs(folders: tuple[Path, Path]) -> None:
    """`python -m phase6_integration.cli` in a model's folder. What Python loads before the first line of this project
    is out of its hands, as SECURITY.md says."""
    _, model = folders
    before = loaded("-c", "import phase0_request.support.entry, runpy, sys; print(*sys.modules)")
    set_traps(model, IMPORTABLE - before - PHASES)
    for server in serve(model, "-m", "phase6_integration.cli", "serve", "."):
        check_an_answer(server)
    assert not (model.parent / "sprung").exists()


def test_processes_that_a_command_starts_do_not_add_their_working_directory(tmp_path: Path) -> None:
    """multiprocessing starts `python -c`, which looks for its modules in the working directory first."""
    (tmp_path / "multiprocessing.py").write_text("print('sprung')")
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import multiprocessing'])"
    (tmp_path / "program.py").write_text(f"def main():\n    {start}\n")
    program = "import sys, phase0_request.support.entry as e; import program; e.run('program:main')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_download_brings_no_code_and_no_pickle() -> None:
    """Remote code of a model repository (`trust_remote_code`) is never fetched, so it cannot be run (CWE-829)."""
    wanted = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja")
    refused = ("modeling_evil.py", "pytorch_model.bin", "model.pkl", "evil.so", ".numba_config.yaml", "setup.cfg")
    assert list(filter_repo_objects([*wanted, *refused], allow_patterns=PATTERNS)) == list(wanted)
    assert not [file for file in ROOT.glob("phase*/**/*.py") if "trust_remote_code" in file.read_text()]
