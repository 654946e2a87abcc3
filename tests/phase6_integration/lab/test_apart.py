"""Prefill and decode in two processes: the hand-over changes no token, and every page comes back."""

import pytest

from phase2_prefill_decode.lab.shapes import SHAPES
from phase6_integration.lab.scale import apart
from tests.phase2_prefill_decode.tiny import TINY


def test_two_processes_give_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few pages that most prompts wait for those that the second process sends back."""
    monkeypatch.setitem(SHAPES, "17m", TINY)
    for name, value in {"PROMPTS": (16, 40), "ANSWER": 6, "PREFILL_PAGES": 4}.items():
        monkeypatch.setattr(apart, name, value)
    arrivals = apart.trace(6, None)
    one, two = apart.together(arrivals, chunk=16), apart.apart(arrivals)
    assert [each.tokens for each in two] == [each.tokens for each in one]
