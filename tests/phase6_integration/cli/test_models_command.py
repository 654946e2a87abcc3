"""`nanoserve models`, over a cache as the Hugging Face hub lays it out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phase0_request.tokenizer import BUNDLED

MODELS = [sys.executable, "-m", "phase6_integration.cli", "models"]


def put(cache: Path, name: str, ref: str = "main") -> Path:
    """An empty snapshot of a repository."""
    repository = cache / f"models--{name.replace('/', '--')}"
    place = repository / "snapshots" / ("0" * 39 + str(len(ref) % 10))
    place.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(place.name)
    return place


def config(place: Path, **changed: Any) -> None:
    known = json.loads((BUNDLED / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(known | changed))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    whole = put(tmp_path, "someone/whole")
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(BUNDLED / name, whole / name)
    (put(tmp_path, "someone/whole", "try") / "README.md").write_text("a later branch, which is not the one served")
    config(put(tmp_path, "someone/no-weights"))
    other = put(tmp_path, "another/kind")
    config(other, model_type="gpt2")
    sharded = put(tmp_path, "someone/half-there")
    config(sharded)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    (sharded / "model-1.safetensors").write_bytes(b"x" * 1000)
    (put(tmp_path, "someone/empty") / "README.md").write_text("nothing")
    data = tmp_path / "datasets--someone--data" / "snapshots" / ("1" * 40)
    data.mkdir(parents=True)
    (data / "config.json").write_text("{}")
    return tmp_path


def run(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_CACHE": str(cache)}
    return subprocess.run([*MODELS, *options], capture_output=True, text=True, timeout=60, env=environment)


def test_each_cached_model_is_listed_with_the_reason_if_it_cannot_be_served(cache: Path) -> None:
    done = run(cache, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    names = ["another/kind", "someone/empty", "someone/half-there", "someone/no-weights", "someone/whole"]
    assert [entry["name"] for entry in listed] == [str(BUNDLED), *names]
    found = {entry["name"]: entry for entry in listed}
    whole = found["someone/whole"]
    assert whole == found[str(BUNDLED)] | {"name": "someone/whole"}
    size = (BUNDLED / "model.safetensors").stat().st_size
    assert whole == {
        "name": "someone/whole", "family": "qwen3", "parameters": 4_197_120, "bytes": size, "dtype": "bfloat16",
        "context": 2048, "supported": True, "why": None,
    }  # fmt: skip
    reasons = {name: entry["why"] for name, entry in found.items() if not entry["supported"]}
    assert len(reasons) == 4
    assert "got 'gpt2'" in reasons["another/kind"]
    assert "config.json" in reasons["someone/empty"]
    assert reasons["someone/half-there"] == "1 of 2 weight files are missing, model-2.safetensors first"
    assert reasons["someone/no-weights"] == "it has no weights in safetensors"
    assert found["someone/half-there"]["bytes"] == 1000
