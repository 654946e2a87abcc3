"""Clients for Node: OpenAI's, Anthropic's and the AI SDK; a scenario is a function that `node` exports, run alone."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from subject import Server

FOLDER = Path(__file__).parent / "node"


def scenarios(file: str) -> list[str]:
    return re.findall(r"^export async function (\w+)", (FOLDER / f"{file}.mjs").read_text(), re.MULTILINE)


def run(server: Server, file: str, scenario: str) -> subprocess.CompletedProcess[str]:
    where = {"SERVER_URL": server.url, "SERVER_KEY": server.key, "SERVER_MODEL": server.model}
    command = ["node", FOLDER / "run.mjs", file, scenario]
    return subprocess.run(command, env=os.environ | where, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("scenario", scenarios("openai"))
def test_openai(server: Server, scenario: str) -> None:
    done = run(server, "openai", scenario)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", scenarios("ai_sdk"))
def test_ai_sdk(server: Server, scenario: str) -> None:
    done = run(server, "ai_sdk", scenario)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", scenarios("anthropic"))
def test_anthropic(server: Server, scenario: str) -> None:
    done = run(server, "anthropic", scenario)
    assert done.returncode == 0, done.stderr
