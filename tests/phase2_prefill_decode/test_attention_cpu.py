"""The CPU's attention around the switch between its two kernels, and the matrix product that it uses."""

from typing import Any

import numpy as np
import pytest
import torch

from phase2_prefill_decode.kernels.attention import ATTEND
from phase2_prefill_decode.kernels.cpu.decode import FEW
from phase2_prefill_decode.kernels.cpu.intrinsics import kernel
from phase2_prefill_decode.kernels.cpu.matmul import COLUMNS, add_product
from phase2_prefill_decode.kernels.cpu.prefill import KEYS, ROWS
from tests.phase2_prefill_decode.attention_cases import TOLERANCE, Case, prompts

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUP = 2  # the default of a Case

CASES = {
    **{f"{new}_new": Case([90, 90 + new, new], [new, new, new]) for new in (FEW // GROUP, FEW // GROUP + 1, 8, 9)},
    **{f"tile_{n:+}": prompts(ROWS // GROUP + n, 2 * ROWS // GROUP + n) for n in (-1, 0, 1)},
    **{f"keys_{n:+}": Case([KEYS + n, 4 * KEYS + n], [30, 30]) for n in (-1, 0, 1)},
    "split": Case([1100, 530, 513], [20, 32, 7]),
    "split_in_a_window": Case([1100, 700], [20, 32], window=600),
    "a_window_over_many_tiles": prompts(400, window=130),
    "a_window_of_one": prompts(100, window=1),
    "a_decode_of_many_heads": Case([70, 600], [1, 1], heads=24, kv_heads=2),
    "a_group_larger_than_a_tile": Case([40, 20], [1, 20], heads=71, kv_heads=1),
    **{f"heads_of_{n}": prompts(70, 33, head_dim=n) for n in (8, 20, 31, 47, 80, 256)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_slices_of_few_and_of_many_rows_match_the_oracle(case: Case, dtype: torch.dtype) -> None:
    inputs = case.inputs("cpu", dtype)
    found = case.run(ATTEND.load("cpu"), inputs)
    torch.testing.assert_close(found.double(), case.oracle(inputs), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@kernel
def product(sums: Any, left: Any, right: Any) -> None:
    add_product(sums, left, right)


@pytest.mark.parametrize("inner", [1, 2, 64, 129])
@pytest.mark.parametrize("across", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(("rows", "columns"), [(8, COLUMNS), (16, 5 * COLUMNS), (64, 2 * COLUMNS)])
def test_the_product_is_added_to_its_result(rows: int, columns: int, inner: int, across: bool) -> None:
    rng = np.random.default_rng(rows + inner)
    # wider than the part that is used: the rest must not be touched
    sums, right = (rng.standard_normal((n, columns + 16), np.float32) for n in (rows, inner))
    left = (
        rng.standard_normal((inner, rows), np.float32).T if across else rng.standard_normal((rows, inner), np.float32)
    )
    wanted = sums.astype(np.float64)
    wanted[:, :columns] += left.astype(np.float64) @ right[:, :columns]
    product(sums[:, :columns], left, right[:, :columns])
    assert np.allclose(sums, wanted, atol=2e-5, rtol=2e-5)
