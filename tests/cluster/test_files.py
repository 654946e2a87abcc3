"""Configuration files that are wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"http_options": {"prt": 1}}, "http_options.prt: Extra inputs are not permitted"),
        ({"applications": []}, "one must have import_path"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(configuration(2, 8000) | change))
    command = [sys.executable, "-m", "phase6_integration.cli", "deploy", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
