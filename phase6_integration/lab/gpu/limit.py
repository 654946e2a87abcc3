"""A pytest plugin: a test has so many seconds. Then it fails, and if it hangs outside Python its process ends.

Under pytest-xdist another worker takes the place of one that ended, so the tests behind it still run.
"""

import faulthandler
import os
import signal
from collections.abc import Generator
from types import FrameType

import pytest

STDERR = os.dup(2)  # pytest captures 2 while a test runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-seconds", type=int, default=120, help="after which a test fails")
    parser.addoption("--test-grace", type=int, default=20, help="after which one that did not fail ends its process")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seconds, grace = (item.config.getoption(name) for name in ("--test-seconds", "--test-grace"))

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {seconds} s")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + grace, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
