"""The core by itself, in a copy without extras: a chat streams, and the tests of the core pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIX = "phase6_integration"
TAKEN_OFF = (
    "extras",
    "app.py",
    "serve.py",
    "cli",
    "load",
    "lab",
    "adversarial",
    "__pycache__",
)  # and what needs extras
CHAT = """
import asyncio, json
from phase6_integration.api.application import application
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.asgi import Call

async def main():
    async with AsyncEngine(EngineOptions(kv_cache_pages=64, threads=1)) as engine:
        app = application(engine, ServerSettings())
        body = {"messages": [{"role": "user", "content": "What is a page?"}], "stream": True, "max_tokens": 16}
        async with Call(app, "/v1/chat/completions", body) as call:
            await call.until(lambda call: call.complete)
        *chunks, last = call.events
        assert last == "[DONE]", last
        print("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
        grammar = {**body, "response_format": {"type": "json_object"}}
        async with Call(app, "/v1/chat/completions", grammar) as call:
            await call.until(lambda call: call.complete)
        print(call.json["error"]["message"])

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which phase 6 has no extras."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "tests").mkdir()
    for place in (*ROOT.glob("phase[0-5]_*"), *ROOT.glob("tests/phase[0-5]_*"), ROOT / "tests/conftest.py"):
        (folder / place.relative_to(ROOT)).symlink_to(place)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for place in (SIX, f"tests/{SIX}"):
        shutil.copytree(ROOT / place, folder / place, ignore=shutil.ignore_patterns(*TAKEN_OFF))
    return folder


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(core)}
    return subprocess.run([sys.executable, *command], cwd=core, env=environment, capture_output=True, text=True)


def test_a_chat_streams_without_wings(core: Path) -> None:
    done = run(core, "-c", CHAT)
    assert done.returncode == 0, done.stderr
    answer, refused = done.stdout.splitlines()
    assert len(answer.split()) > 3
    assert refused == "response_format: this server is without structured output"


@pytest.mark.slow  # they run a second time
@pytest.mark.parametrize("part", ["engine", "process", "api"])
def test_the_tests_of_the_core_pass_without_wings(core: Path, part: str) -> None:
    options = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly")
    done = run(core, "-m", "pytest", *options, f"tests/{SIX}/{part}")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
