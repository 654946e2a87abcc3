"""The process of grammars, as fixtures."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from phase6_integration.extras.structured import grammar_process
from tests.phase6_integration.extras.structured.isolated import Here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Steps wait as long as it takes, and for nothing if the process does not answer."""
    monkeypatch.setattr(grammar_process, "PATIENCE", 60.0)
    grammars = Here()
    with closing(grammars.process):
        yield grammars


@pytest.fixture
def silent(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The process answers only when a test says so."""
    monkeypatch.setattr(grammar_process, "PATIENCE", 0.0)
    here.process.answers, here.process.patience = False, 0.0
    return here
