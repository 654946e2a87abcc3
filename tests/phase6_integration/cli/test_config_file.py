"""`nanoserve serve --config`: flags in YAML, read as those of the command line."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phase6_integration.cli.main import main


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Options, settings and warnings of each server that would have been started."""
    calls: list[Any] = []
    fake = SimpleNamespace(serve=lambda *given: calls.append(given) or 0)
    monkeypatch.setitem(sys.modules, "phase6_integration.serve", fake)
    for name in ("NANOSERVE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def written(folder: Path, text: str) -> str:
    file = folder / "server.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_sets_what_flags_set(tmp_path: Path, served: list[Any]) -> None:
    file = written(
        tmp_path,
        """
        model: org/model
        port: 8001
        max_model_len: 2K          # underscores and dashes are the same
        dtype: half
        enable-prefix-caching: false
        enforce-eager: true
        gpu-memory-utilization: 0.5
        served-model-name: [a, b]
        api-key: [k1, k2]
        allowed-origins: https://chat.example.com
        override-generation-config: {temperature: 0.5}
        seed: null
        """,
    )
    assert main(["serve", "--config", file]) == 0
    ((options, settings, warnings),) = served
    assert (options.model, options.max_model_len, options.dtype, options.seed) == ("org/model", 2048, "float16", None)
    assert (options.enable_prefix_caching, options.enforce_eager) == (False, True)
    assert options.gpu_memory_utilization == 0.5
    assert (settings.port, settings.served_model_names, settings.api_keys) == (8001, ("a", "b"), ("k1", "k2"))
    assert settings.allowed_origins == ("https://chat.example.com",)
    assert settings.override_generation_config == {"temperature": 0.5}
    assert warnings == [], "ps does not show the keys of a file"


def test_the_command_line_wins(tmp_path: Path, served: list[Any]) -> None:
    file = written(tmp_path, "model: a\nport: 1\nserved-model-name: [x, y]\nenforce-eager: true\nhost: 0.0.0.0\n")
    assert main(["serve", "b", "--port", "2", "--served-model-name", "z", "--no-enforce-eager", "--config", file]) == 0
    ((options, settings, _),) = served
    assert (options.model, options.enforce_eager) == ("b", False)
    assert (settings.port, settings.served_model_names, settings.host) == (2, ("z",), "0.0.0.0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "max-model-length: 5\nsecret: 1\n",
            "no such flag: --max-model-length (did you mean --max-model-len?), --secret",
        ),
        ("config: other.yaml\n", "no such flag: --config"),
        ("help: true\n", "no such flag: --help"),
        ("no-enforce-eager: true\n", "no such flag: --no-enforce-eager (did you mean --enforce-eager?)"),
        ("port: http\n", "argument --port: an integer such as"),
        ("port: [1, 2]\n", "argument --port: it takes one value, and here are 2"),
        ("enforce-eager: 1\n", "argument --enforce-eager: it is true or false"),
        ("- port\n", "must hold names of flags with their values"),
        ("port: [1\n", "line 2 is not YAML: "),
        ("page_size: 0\n", "page_size must be an integer from 1"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(
    text: str, words: str, tmp_path: Path, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", written(tmp_path, text)])
    assert (end.value.code, served) == (2, [])
    err = capsys.readouterr().err
    assert err.startswith("nanoserve serve: ")
    assert (words in err, err.count("\n")) == (True, 1), err


def test_an_empty_file_changes_nothing(tmp_path: Path, served: list[Any]) -> None:
    assert main(["serve", "--config", written(tmp_path, "# nothing\n")]) == 0
