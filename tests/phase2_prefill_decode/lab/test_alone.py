"""Answers alone and in a batch: what is compared and recorded."""

import json
from pathlib import Path

import pytest
import torch

from phase2_prefill_decode.lab import alone
from phase2_prefill_decode.loading.model import Model


def test_answers_that_a_batch_changes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 none does."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(alone, "OUTPUT", 4)
    model, answers = Model.load(device="cpu", dtype="float32"), alone.answers
    monkeypatch.setattr(alone, "models", lambda: {"float32": model})
    assert alone.main(["--requests", "5", "--json", str(tmp_path / "a.json")]) == 0
    figures = json.loads((tmp_path / "a.json").read_text())["figures"]
    assert figures == {"requests": 5, "float32": {"linear": "torch", "batch_4": 0, "batch_16": 0}}

    def changed(model: Model, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
        found = answers(model, prompts, batch_size)
        return [[*found[0][:-1], -1], *found[1:]] if batch_size == 16 else found

    monkeypatch.setattr(alone, "answers", changed)
    assert alone.measure(5)["float32"]["batch_16"] == 1
