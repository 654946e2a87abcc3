"""The server against what it says of itself: schemathesis reads /openapi.json and tries all of it, right and wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phase6_integration import connect
from tests.phase6_integration.fake_engine import FakeEngine, served

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
CONFIG = """
[checks.positive_data_acceptance]
# 400: what a schema cannot say; which of them is right is checked in schema_hooks.py. 404: a model that is not served.
expected-statuses = ["2xx", "400", "404"]
[checks.negative_data_rejection]
# 413: a list too long for the schema may be too long for the body limit, which is looked at first.
# 404: the name of a model that is not served.
expected-statuses = ["400", "401", "404", "405", "413", "415"]
"""
KEY = "a-key-of-the-test"


def faults(folder: Path, max_model_len: int, *options: str) -> str:
    """What one run finds, with every check there is, against a server with low limits, so that answers are short."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    settings = connect.settings(api_keys=(KEY,), max_choices=4)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/phase6_integration'}",
        "SCHEMATHESIS_HOOKS": "schema_hooks",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),  # it has the table of Unicode, two seconds to make
    }
    with served(lambda: FakeEngine(max_model_len=max_model_len), settings) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{url}/openapi.json"]
        fixed = ["--checks", "all", "--no-color", "--header", f"Authorization: Bearer {KEY}", "--request-timeout", "60"]
        run = subprocess.run([*command, *fixed, *options], capture_output=True, text=True, cwd=folder, env=env)
    every_operation = "Tested: 26" in run.stdout
    return "" if run.returncode == 0 and every_operation else run.stdout[-8000:] + run.stderr[-2000:] or "no output"


def test_the_server_accepts_what_its_schema_allows(tmp_path: Path) -> None:
    """Bodies at every bound, and random ones. `test_request_fields.py` has what is forbidden, field by field."""
    assert faults(tmp_path, 48, "--mode", "positive", "--max-examples", "1", "--generation-deterministic") == ""


@pytest.mark.slow
def test_the_server_refuses_what_its_schema_forbids(tmp_path: Path) -> None:
    assert faults(tmp_path, 48, "--mode", "negative", "--max-examples", "10", "--generation-deterministic") == ""


@pytest.mark.slow
def test_the_server_does_what_its_schema_says_at_length(tmp_path: Path) -> None:
    fixed = ("--seed", "6", "--generation-database", "none")
    assert faults(tmp_path, 256, "--max-examples", "300", *fixed, "--continue-on-failure") == ""
