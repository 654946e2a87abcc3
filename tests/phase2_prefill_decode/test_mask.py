"""Every backend of the mask that excludes tokens, against numpy."""

import numpy as np
import pytest
import torch

from phase2_prefill_decode.extras.grammar.constraints import words
from phase2_prefill_decode.extras.grammar.mask import ApplyMask, apply_mask_on
from tests.differences import difference
from tests.phase1_kv_pool.support import bits, device_of, every_backend_and_dtype


def apply_mask_of(backend: str) -> ApplyMask:
    return apply_mask_on(torch.device("cuda" if backend == "triton" else "cpu"))  # interpreted without a GPU


def wanted(logits: torch.Tensor, masks: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """The logits with -inf in place of those that a mask excludes, token by token."""
    result = logits.clone()
    for row, number in enumerate(numbers):
        for token in range(logits.shape[1]) if number >= 0 else ():
            allowed = int(masks[number, token // 32]) >> token % 32 & 1
            if not allowed and not logits[row, token].isnan():
                result[row, token] = -torch.inf
    return result


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096 + 70])
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_excluded_tokens_get_minus_infinity_and_the_others_stay_as_they_are(
    backend: str, dtype: torch.dtype, vocab: int
) -> None:
    generator, device = torch.Generator().manual_seed(vocab), device_of(backend)
    logits = torch.randn(5, vocab + 3, generator=generator).to(dtype)[:, :vocab]  # rows of a wider tensor
    masks = torch.from_numpy(np.random.default_rng(vocab).integers(-(1 << 31), 1 << 31, (3, words(vocab)), np.int32))
    numbers = [2, -1, 0, 1, 2]
    logits[0, 0], logits[2, -1], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    before = logits.clone()
    found = apply_mask_of(backend)(logits.to(device), masks.to(device), torch.tensor(numbers, device=device))
    assert not difference(found, wanted(before, masks, numbers), "row", "token"), f"masks of the rows: {numbers}"
    assert torch.equal(bits(logits), bits(before)), (
        "the logits were changed in place: their log-probabilities are wanted"
    )


@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_a_mask_of_zeros_excludes_a_whole_row_and_no_other(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    masks = torch.zeros(1, words(100), dtype=torch.int32, device=device)
    found = apply_mask_of(backend)(logits, masks, torch.tensor([-1, 0], device=device))
    assert not difference(found[0], logits[0], "token"), "row 0 has no mask (-1)"
    assert not difference(found[1], torch.full((100,), -torch.inf, dtype=dtype), "token"), "row 1 has a mask of zeros"
