from collections.abc import Iterator

import pytest

from phase6_integration.server.settings import ServerSettings
from tests.phase6_integration.adversarial.raw import listening
from tests.phase6_integration.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def plain() -> Iterator[str]:
    """A server with the default settings."""
    with listening(FakeEngine, ServerSettings()) as url:
        yield url
