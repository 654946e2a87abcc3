"""Where a model's files come from: a directory before the hub, and a commit that the log names."""

import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from phase6_integration.engine.hub import PATTERNS, directory_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The calls of the hub, which has one repository. The working directory is empty."""
    calls: list[Any] = []

    def download(name: str, **given: Any) -> str:
        calls.append((name, given))
        if name != "org/model":
            raise LocalEntryNotFoundError("not there")
        return f"/cache/snapshots/{COMMIT}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    return calls


def said(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = caplog.records
    return dict(vars(record)["fields"])


@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_the_commit_of_a_repository_is_logged(
    revision: str | None, asked: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert directory_of("org/model", revision) == Path(f"/cache/snapshots/{COMMIT}")
    assert asked == [("org/model", {"revision": revision, "cache_dir": None, "allow_patterns": PATTERNS})]
    assert said(caplog) == {"repository": "org/model", "revision": revision or "main", "commit": COMMIT}


def test_a_directory_wins_over_the_hub_and_the_log_says_so(
    asked: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "org/model").mkdir(parents=True)
    assert directory_of("org/model") == Path("org/model")
    assert said(caplog) == {"directory": tmp_path / "org/model"}
    with pytest.raises(ValueError, match="org/model is a directory here"):
        directory_of("org/model", "main")
    assert asked == []


def test_a_gguf_file_wins_over_the_hub_and_must_be_there(
    asked: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"there is no file model.gguf"):
        directory_of("model.gguf")
    (tmp_path / "model.gguf").touch()
    assert directory_of("model.gguf") == Path("model.gguf")
    assert said(caplog) == {"file": tmp_path / "model.gguf"}
    assert asked == []


def test_a_revision_that_the_hub_does_not_have_is_named(asked: list[Any]) -> None:
    with pytest.raises(ValueError, match="the hub did not give org/other in revision v2"):
        directory_of("org/other", "v2")
