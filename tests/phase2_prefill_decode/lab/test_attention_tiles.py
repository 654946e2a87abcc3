"""Tiled attention in plain torch, against torch's own attention in float64: tiles and splits of any size."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phase2_prefill_decode.lab.attention_tiles import accumulate, join, tiled
from tests.phase2_prefill_decode.attention_cases import Case, decodes
from tests.phase2_prefill_decode.test_attention import cases


@settings(max_examples=60)
@given(case=cases(), chunk=st.integers(1, 80), tile=st.integers(1, 80))
def test_tiles_and_splits_do_not_change_the_result(case: Case, chunk: int, tile: int) -> None:
    inputs = case.inputs("reference", torch.float32)
    found = case.run(partial(tiled, chunk=chunk, tile=tile), inputs)
    torch.testing.assert_close(found.double(), case.oracle(inputs), atol=1e-5, rtol=1e-5)


def test_scores_of_hundreds_do_not_overflow() -> None:
    case = decodes(70, 600, spread=150.0)
    inputs = case.inputs("reference", torch.float32)
    found = case.run(partial(tiled, chunk=128), inputs)
    torch.testing.assert_close(found.double(), case.oracle(inputs), atol=1e-3, rtol=1e-3)


def test_the_example_of_the_chapter() -> None:
    """Scores 1 and then 3: the sum shrinks to a quarter and gains 1."""
    nothing = torch.full((1,), -1e30), torch.zeros(1), torch.zeros(1, 1)
    one = accumulate(torch.tensor([[1.0]]), torch.tensor([[8.0]]), *nothing)
    assert [x.item() for x in one] == [1.0, 1.0, 8.0]
    both = accumulate(torch.tensor([[3.0]]), torch.tensor([[4.0]]), *one)
    assert [x.item() for x in both] == [3.0, 1.25, 6.0]


def test_an_empty_split_has_no_weight() -> None:
    parts = torch.tensor([[[4.0]], [[7.0]], [[8.0]]])
    sizes = torch.tensor([[1.0], [-torch.inf], [3.0]])
    assert join(parts, sizes).item() == pytest.approx((2 * 4 + 8 * 8) / 10)
