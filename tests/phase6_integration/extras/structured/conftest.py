"""Processes of grammars, as fixtures."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from phase6_integration.extras.structured import isolated_process
from tests.phase6_integration.extras.structured.isolated import Here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Steps wait as long as it takes, and for nothing if the processes do not answer."""
    monkeypatch.setattr(isolated_process, "PATIENCE", 60.0)
    with closing(Here()) as processes:
        yield processes


@pytest.fixture
def silent(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Processes that answer only when a test says so."""
    monkeypatch.setattr(isolated_process, "PATIENCE", 0.0)
    here.answers = False
    return here
