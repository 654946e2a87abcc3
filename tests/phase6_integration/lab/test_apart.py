"""Prefill and decode in two processes: the hand-over changes no token, and every page comes back."""

import json
from pathlib import Path

import pytest

from phase2_prefill_decode.lab.shapes import SHAPES
from phase6_integration.lab.scale import apart
from tests.phase2_prefill_decode.tiny import TINY


def test_two_processes_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few pages that the first process waits for those that the second sends back."""
    monkeypatch.setitem(SHAPES, "17m", TINY)
    for name, value in {"PROMPTS": (16, 40), "ANSWER": 6, "CHUNKS": (16, apart.WHOLE), "PREFILL_PAGES": 4}.items():
        monkeypatch.setattr(apart, name, value)
    assert apart.main(["-n", "6", "--json", str(tmp_path / "apart.json")]) == 0
    figures = json.loads((tmp_path / "apart.json").read_text())["figures"]
    assert figures["same_tokens"]
    assert set(figures["ways"]) == {"chunk_16", "whole", "apart"}
