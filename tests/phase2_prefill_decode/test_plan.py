"""The plan of a mixed step: which kernel computes a sequence, and the blocks of prompts and chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase2_prefill_decode.kernels.triton.plan import plan


def seen_by(block_of: tuple[int, int], sizes: list[tuple[int, int]], block: int) -> int:
    sequence, first = block_of
    new, length = sizes[sequence]
    return length - new + min(first + block, new)


sizes_of_steps = st.lists(
    st.integers(0, 3000).flatmap(
        lambda length: st.tuples(st.integers(0, min(length, 20)) | st.integers(0, length), st.just(length))
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(
    sizes=sizes_of_steps,
    group=st.integers(1, 20),
    block=st.integers(1, 130),
    window=st.none() | st.integers(1, 4000),
)
def test_every_new_token_is_in_one_block(
    sizes: list[tuple[int, int]], group: int, block: int, window: int | None
) -> None:
    step = plan(tuple(sizes), group, block, window)
    blocks = [tuple(row) for row in step.blocks.tolist()]
    long = {sequence for sequence, _ in blocks}
    short = {number for number, (new, _) in enumerate(sizes) if 0 < new <= step.queries}
    assert short | long == {number for number, (new, _) in enumerate(sizes) if new > 0}, "a sequence has no kernel"
    assert not short & long, "a sequence is computed by both kernels"
    assert step.longest == max((sizes[n][1] for n in short), default=0), "the most tokens of a short sequence"
    assert (step.queries == 0) == (not short), "queries is 0 if no sequence is short, and only then"
    for sequence in long:
        firsts = sorted(first for owner, first in blocks if owner == sequence)
        assert firsts == list(range(0, sizes[sequence][0], block)), f"the blocks of sequence {sequence}"
    if window is None:
        work = [seen_by(pair, sizes, block) for pair in blocks]
        assert work == sorted(work, reverse=True), "blocks that see the most keys go first"


@pytest.mark.parametrize(
    ("new", "group", "short"),
    [
        ([1, 500], 4, [1]),
        ([4, 5, 500], 4, [4]),
        ([1, 2, 3, 500], 8, [1, 2]),
        ([1, 2, 500], 16, [1]),
        ([1, 2, 500], 71, [1]),
        ([4, 5, 500], 3, [4]),  # 5 would fit into 16 rows; the limit is a power of two
        ([16, 17], 1, [16]),
        ([9, 1], 8, [1]),
        ([300], 4, []),
        ([], 4, []),
    ],
)
def test_a_sequence_is_short_if_its_queries_fit_into_one_tile(new: list[int], group: int, short: list[int]) -> None:
    step = plan(tuple((n, 600) for n in new), group, 32, None)
    found = sorted(set(new) - {new[sequence] for sequence in step.blocks[:, 0].tolist()})
    assert found == short, f"group {group}: of sequences with {new} new tokens these have no blocks"
    assert step.queries in (0, 1, 2, 4, 8, 16), "queries is a power of two, or 0"
    assert max(short, default=0) <= step.queries <= max(16 // group, 1), f"group {group}, short sequences with {short}"


def test_blocks_that_see_the_most_keys_go_first() -> None:
    step = plan(((64, 64), (64, 1000), (1, 5000)), 4, 32, None)
    assert step.blocks.tolist() == [[1, 32], [1, 0], [0, 32], [0, 0]], "(sequence, first new token), most keys first"
    windowed = plan(((64, 64), (64, 1000), (1, 5000)), 4, 32, 20)
    assert windowed.blocks.tolist() == [[0, 32], [1, 0], [1, 32], [0, 0]], "with a window all see about as many keys"
