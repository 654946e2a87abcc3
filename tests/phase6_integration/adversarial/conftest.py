from collections.abc import Iterator

import pytest

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.adversarial.raw import listening
from tests.phase6_integration.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def plain() -> Iterator[str]:
    """A server with the default settings."""
    with listening(FakeEngine, ServerSettings()) as url:
        yield url


@pytest.fixture(scope="module")
def hurried() -> Iterator[str]:
    """A server with short time limits, for what is to be late and for nothing else."""
    with listening(FakeEngine, connect.settings(receive_timeout=1.0, send_timeout=0.2)) as url:
        yield url


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    """A server with small limits of heads and bodies."""
    with listening(FakeEngine, connect.settings(max_body_bytes=1000, max_header_bytes=2000, max_headers=20)) as url:
        yield url


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """A server with a key, that pages of all origins may use."""
    with listening(FakeEngine, connect.settings(api_keys=("k",), allowed_origins=("*",))) as url:
        yield url
