"""The CPU's attention around its tiles, blocks and splits; the bits of a row in any step; and what it does in
registers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phase2_prefill_decode.extras.cpu.attention import TILE_ROWS
from phase2_prefill_decode.extras.cpu.intrinsics import kernel
from phase2_prefill_decode.extras.cpu.scores import KEYS, LANES, transpose
from phase2_prefill_decode.extras.cpu.tiles import SPLIT
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from tests.phase1_kv_pool.support import bits
from tests.phase2_prefill_decode.attention_cases import TOLERANCE, Case, Inputs, prompts
from tests.phase2_prefill_decode.backends import CPU

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUP = 2  # the default of a Case

CASES = {
    **{f"{new}_new": Case([90, 90 + new, new], [new, new, new]) for new in (2, 4, 5, 8, 9)},
    **{f"tile_{n:+}": prompts(TILE_ROWS // GROUP + n, 2 * TILE_ROWS // GROUP + n) for n in (-1, 0, 1)},
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
    found = case.run(CPU.attend, inputs)
    torch.testing.assert_close(found.double(), case.oracle(inputs), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


Part = tuple[int, int, int]  # of a sequence: its number, and the tokens that are new, from `start` to `end`


def step(case: Case, inputs: Inputs, parts: Sequence[Part]) -> Tensor:
    """The result of a step that has these parts of the sequences of `inputs`, each a prompt."""
    queries, new = inputs.query.split(case.new), [end - start for _, start, end in parts]
    metadata = AttentionMetadata(
        torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        inputs.metadata.page_table[[number for number, _, _ in parts]],
        max(new),
        max(end for _, _, end in parts),
    )
    query = torch.cat([queries[number][start:end] for number, start, end in parts])
    return case.run(CPU.attend, replace(inputs, query=query, metadata=metadata))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Case, list[list[Part]]]:
    """Prompts, and steps that compute them in chunks of any size or token by token, some beside others."""
    shape = {
        "heads": draw(st.sampled_from([2, 6, 16])),
        "kv_heads": draw(st.sampled_from([1, 2])),
        "head_dim": draw(st.sampled_from([16, 20, 64])),
        "page_size": draw(st.sampled_from([1, 5, 16, 64])),
        "window": draw(st.none() | st.integers(1, 140) | st.integers(SPLIT, SPLIT + 200)),
    }
    lengths = draw(st.lists(st.integers(1, 140) | st.integers(SPLIT - 3, 2 * SPLIT + 90), min_size=1, max_size=3))
    made: list[list[Part]] = [[] for _ in range(draw(st.integers(1, 12)))]
    for number, length in enumerate(lengths):
        for parts in made:
            start = draw(st.integers(0, length - 1))
            parts.append((number, start, draw(st.just(start + 1) | st.integers(start + 1, length))))
    return prompts(*lengths, **shape), [draw(st.permutations(parts)) for parts in made]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(given=steps(), threads=st.integers(1, 3))
def test_a_row_has_the_same_bits_in_a_prompt_in_a_chunk_and_in_a_decode(
    dtype: torch.dtype, given: tuple[Case, list[list[Part]]], threads: int
) -> None:
    """Its sums depend on its own keys and on their positions: on no other row of the step, and on no thread."""
    case, made = given
    inputs, before = case.inputs("cpu", dtype), torch.get_num_threads()
    whole = case.run(CPU.attend, inputs).split(case.new)
    torch.set_num_threads(threads)
    try:
        for parts in made:
            found = step(case, inputs, parts).split([end - start for _, start, end in parts])
            for (number, start, end), rows in zip(parts, found, strict=True):
                assert torch.equal(bits(rows), bits(whole[number][start:end])), (number, start, end, parts)
    finally:
        torch.set_num_threads(before)


@kernel
def transposed(rows: Any, offset: Any, result: Any) -> None:
    transpose(rows.ctypes.data, offset, result.ctypes.data, result.strides[0])


def test_a_block_of_rows_is_written_as_columns() -> None:
    rows, result = torch.randn(LANES, 3 * LANES), np.zeros((LANES, LANES + 5), np.float32)
    addresses = np.array([row.data_ptr() for row in rows])
    transposed(addresses, LANES * rows.itemsize, result)
    assert np.array_equal(result[:, :LANES], rows[:, LANES : 2 * LANES].numpy().T)
    assert not result[:, LANES:].any()
