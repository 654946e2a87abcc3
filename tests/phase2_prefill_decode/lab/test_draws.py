"""The two ways to draw of chapter 2: the same probabilities, and only one depends on the rest of the batch."""

import numpy as np
import pytest
import torch

from phase2_prefill_decode.lab.naive.draws import by_generator, by_race, drawn
from tests.phase2_prefill_decode.test_sampler_draws import z_of_chi_square

N = 20_000


@pytest.mark.parametrize("way", ["one generator", "a race"])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(way: str) -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1))
    rows = logits.expand(N, -1)
    tokens = by_race(rows, range(N), 3) if way == "a race" else by_generator(rows, torch.Generator().manual_seed(1))
    counts = np.bincount(tokens.numpy(), minlength=6)
    assert abs(z_of_chi_square(counts, N * logits.double().softmax(-1).numpy())) < 4


def test_only_the_race_draws_the_same_alone_and_in_a_batch() -> None:
    assert drawn("a race", 1) == drawn("a race", 2) == drawn("a race", 5)
    assert drawn("one generator", 1) != drawn("one generator", 2)
