"""One `nanoserve serve` of the bundled model for all scenarios, started as a user starts it, with an API key."""

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator

import pytest
from subject import Server

os.environ |= {  # no client asks the network for anything but its answers
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serve", default="nanoserve serve", metavar="COMMAND", help="starts the server")


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """It must end in order, and without a traceback in its log."""
    command = [*shlex.split(pytestconfig.getoption("--serve")), "--port", "0", "--api-key", "sk-of-the-scenarios"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        try:
            until(r"\bready\b", process.stderr, log)
            address = re.search(r"listening.*(http://[\d.]+:\d+)", "".join(log))
            assert address, "".join(log)
            reader.start()
            yield Server(f"{address[1]}/v1", "sk-of-the-scenarios", "tiny_chat")
        finally:
            process.terminate()
            assert process.wait(60) == 0
        reader.join()
    assert [line for line in log if "Traceback" in line] == []


def until(pattern: str, lines: Iterator[str], log: list[str]) -> None:
    for line in lines:
        log.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError(f"the server ended before it was ready:\n{''.join(log)}")
