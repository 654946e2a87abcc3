"""API keys that other users of the machine can read (CWE-214)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import phase6_integration.serve
from phase6_integration.cli.main import main
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.extras.edge.middleware import PUBLIC
from phase6_integration.serve_flags import settings_from
from tests.phase6_integration.life import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("# for the app\nsk-old\n\nsk-kept\n")
    return tmp_path / "keys"


def test_keys_in_a_file_are_one_on_each_line(file: Path) -> None:
    settings = settings_from({"api_key_file": str(file)}, {})
    assert settings.of(EdgeSettings).api_keys == ("sk-old", "sk-kept")
    assert "sk-" not in repr(settings)


def test_the_routes_that_need_no_key_are_those_that_security_md_names() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for sentence in (r"every route except ([^.]*)\.", r"a client without a key \| see ([^|]*)\|"):
        (named,) = re.findall(sentence, text)
        health = "`/health`, `/health/`, `/health/live`, `/health/ready`"
        routes = set(re.findall(r"`([^`]*)`", named.replace("the health routes", health)))
        assert routes == PUBLIC


@pytest.mark.parametrize("content", ["", "# none\n\n", "sk one\n", "sk-\xff\n"])
def test_a_file_without_a_valid_key_never_opens_the_server(content: str, file: Path) -> None:
    file.write_text(content, "latin-1")
    with pytest.raises(ValueError, match="key") as caught:
        settings_from({"api_key_file": str(file)}, {})
    assert "sk" not in str(caught.value).replace(str(file), "")


@pytest.mark.parametrize(("given", "environment"), [({"api_key": ["k"]}, {}), ({}, {"NANOSERVE_API_KEY": "k"})])
def test_keys_come_from_a_file_or_from_elsewhere_not_both(
    given: dict[str, Any], environment: dict[str, str], file: Path
) -> None:
    with pytest.raises(ValueError, match="not from both"):
        settings_from({"api_key_file": str(file), **given}, environment)


def test_a_key_on_the_command_line_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine sees it in `ps`."""
    logged: list[Sequence[str]] = []
    monkeypatch.setattr(phase6_integration.serve, "serve", lambda *given: logged.append(given[2]) or 0)
    for flags in (["--api-key", "sk-seen"], []):
        assert main(["serve", *flags]) == 0
    (warning,), silent = logged
    assert "--api-key-file" in warning
    assert "sk-seen" not in warning
    assert not silent
