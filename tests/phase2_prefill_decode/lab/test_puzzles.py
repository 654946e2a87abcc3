"""The puzzles of the Triton primer, against torch. A failure names the program, the place, the expected number and the
one that was found. Every input and every result lies between margins of NaN, and an interpreted kernel
loads only from its arguments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase2_prefill_decode.lab.primer import puzzles
from tests.phase1_kv_pool.support import device_of

DEVICE = device_of("triton")


def addresses(x: Tensor) -> NDArray[np.int64]:
    """Of each number of x: what lies between the rows of a view is not its own."""
    numbers = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    at = numbers.as_strided(x.shape, x.stride(), x.storage_offset())
    return x.untyped_storage().data_ptr() + at.flatten().numpy() * x.element_size()


@pytest.fixture(autouse=True)
def loads_outside_of_the_arguments_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: a GPU has no such check."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    run, load = GridExecutor.__call__, InterpreterBuilder.create_masked_load
    its: dict[str, Tensor] = {}

    def watched_run(self: Any, *arguments: Any) -> None:
        its.clear()
        its.update((name, x) for name, x in zip(self.arg_names, arguments, strict=True) if isinstance(x, Tensor))
        run(self, *arguments)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        asked = np.asarray(pointers.data)[np.asarray(mask.data)].astype(np.int64)
        outside = asked[~np.isin(asked, np.concatenate([addresses(x) for x in its.values()]))]
        if len(outside):
            name, x = min(its.items(), key=lambda pair: abs(int(outside[0]) - pair[1].data_ptr()))
            at = (int(outside[0]) - x.data_ptr()) // x.element_size()
            raise AssertionError(f"a load at {name} + {at}, where no number of {name} is: is a mask missing?")
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", watched_run)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)


def given(*shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers, the same for the same shape."""
    numbers = puzzles.blank(torch.empty(0, device=DEVICE), *shape)
    return numbers.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale)


def problem(y: Tensor, wanted: Tensor, program: Callable[[int], int], *names: str) -> str:
    """The first number of y that is not as wanted, or one that was stored beside y. `program` has the program that
    computes an index of the first dimension; `names` are those of the dimensions."""
    y, wanted = y.cpu(), wanted.cpu()
    wrong = (~torch.isclose(y, wanted, rtol=1e-4, atol=1e-5)).nonzero().tolist()
    if wrong:
        place = ", ".join(f"{name} {at}" for name, at in zip(names, wrong[0], strict=True))
        got = y[tuple(wrong[0])].item()
        nan = " (nothing was stored there, or a NaN)" if got != got else ""
        return (
            f"program {program(wrong[0][0])}, {place}: expected {wanted[tuple(wrong[0])]:.4f}, got {got:.4f}{nan}; "
            f"{len(wrong)} of {y.numel()} numbers differ"
        )
    whole = y.new_empty(0).set_(y.untyped_storage())
    beside = [at - puzzles.MARGIN for at in (~whole.isnan()).nonzero().flatten().tolist()]
    outside = [at for at in beside if not 0 <= at < y.numel()]
    return f"stored outside the result: at offset {outside[0]}, y has {y.numel()} numbers" if outside else ""


@pytest.mark.parametrize("length", [4, 12, 40])
def test_a_program_copies_a_block_of_numbers(length: int) -> None:
    x = given(length)
    said = problem(puzzles.copy(x), x, lambda i: i // 4, "number")
    assert not said, f"{length} numbers in blocks of 4: {said}"


@pytest.mark.parametrize(("rows", "width", "stride"), [(4, 8, 8), (6, 5, 5), (1, 3, 3), (9, 5, 12)])
def test_rows_of_any_number_width_and_stride_are_copied(rows: int, width: int, stride: int) -> None:
    x = given(rows, stride)[:, :width]
    said = problem(puzzles.masked_copy(x), x, lambda row: row // 4, "row", "column")
    assert not said, f"{rows} rows of {width} numbers, {stride} apart, in blocks of 4 rows: {said}"


@pytest.mark.parametrize(("length", "page_size"), [(8, 4), (10, 4), (3, 4), (21, 5), (8, 16), (9, 1)])
def test_tokens_are_gathered_from_their_pages(length: int, page_size: int) -> None:
    """The table ends with the sequence's last page, and garbage lies after it."""
    pages, used = given(12, page_size, 8), -(-length // page_size)
    order = [7, 2, 9, 0, 11, 4, 1, 8, 3][:used]
    table = torch.tensor([*order, *[10**9] * 8], device=DEVICE)[:used]
    said = problem(
        puzzles.gather(pages, table, length), pages[order].flatten(0, 1)[:length], lambda t: t // 8, "token", "column"
    )
    assert not said, f"{length} tokens in the pages {order} of {page_size}: {said}"


@pytest.mark.parametrize(("width", "low"), [(8, 0.0), (5, 0.0), (1, 0.0), (5, -90.0), (13, 90.0)])
def test_the_softmax_of_rows_of_any_width(width: int, low: float) -> None:
    x = given(3, width).add_(low)
    said = problem(puzzles.softmax(x), x.softmax(1), lambda row: row, "row", "column")
    assert not said, f"rows of {width} scores about {low}: {said}"


@pytest.mark.parametrize(("keys", "scale"), [(4, 1.0), (12, 1.0), (1, 1.0), (7, 1.0), (9, 80.0)])
def test_the_weighted_mean_is_computed_in_one_pass(keys: int, scale: float) -> None:
    scores, values = given(3, keys, scale=scale), given(keys)
    said = problem(puzzles.online(scores, values), scores.softmax(1) @ values, lambda row: row, "row")
    assert not said, f"{keys} keys in blocks of 4, scores of up to {scores.abs().max():.0f}: {said}"


def test_the_mean_does_not_depend_on_where_the_highest_score_is() -> None:
    values = given(8)
    for at in range(8):
        scores = given(1, 8)
        scores[0, at] = 100.0
        said = problem(puzzles.online(scores, values), scores.softmax(1) @ values, lambda row: row, "row")
        assert not said, f"the highest of 8 scores is that of key {at}, in blocks of 4: {said}"


LENGTHS = [16, 48, 1, 19]


@pytest.mark.parametrize("length", LENGTHS)
def test_attention_to_contiguous_keys(length: int) -> None:
    query, keys, values = given(16, 32), given(length, 32), given(length, 32)
    wanted = (query @ keys.T * 0.3).softmax(1) @ values
    said = problem(puzzles.attention(query, keys, values, 0.3), wanted, lambda row: 0, "row", "column")
    assert not said, f"{length} keys in tiles of 16: {said}"


def paged(length: int, page_size: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, int, float], Tensor, list[int]]:
    """The arguments for a sequence in pages, with NaN in its last page after its end and in all other pages, and no
    pages after the end of its table; its attention by definition, and its pages."""
    query, order = given(16, 32), [3, 8, 1, 6, 0, 9, 4, 2, 7, 5, 11, 10, 12][: -(-length // page_size)]
    keys, values = given(length, 32), given(length + 1, 32)[1:]
    pools = []
    for side in (keys, values):
        pool = torch.full((13 * page_size, 32), torch.nan, device=DEVICE)
        for token in range(length):
            pool[order[token // page_size] * page_size + token % page_size] = side[token]
        pools.append(pool.view(13, page_size, 32))
    table = torch.tensor([*order, *[10**9] * 16], device=DEVICE)[: len(order)]
    wanted = (query @ keys.T * 0.3).softmax(1) @ values
    return (query, *pools, table, length, 0.3), wanted, order


@pytest.mark.parametrize("page_size", [16, 5, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_over_pages(length: int, page_size: int) -> None:
    arguments, wanted, order = paged(length, page_size)
    said = problem(puzzles.paged(*arguments), wanted, lambda row: 0, "row", "column")
    assert not said, f"{length} keys in the pages {order} of {page_size}, tiles of 16: {said}"


@pytest.mark.parametrize(("length", "chunk"), [(32, 32), (33, 32), (16, 16), (100, 32), (3, 64)])
def test_splits_are_joined_to_the_same_attention(length: int, chunk: int) -> None:
    arguments, wanted, _ = paged(length, 8)
    said = problem(puzzles.in_splits(*arguments, chunk), wanted, lambda row: row, "row", "column")
    assert not said, f"{length} keys in splits of {chunk}, joined: {said}"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU compiles the kernel: nothing can be put in place of its walk")
@pytest.mark.parametrize(("length", "chunk"), [(33, 32), (100, 32), (3, 64)])
def test_each_key_is_walked_over_in_one_split(monkeypatch: pytest.MonkeyPatch, length: int, chunk: int) -> None:
    walk, walked = puzzles.walk, list[tuple[int, int]]()

    def watched(begin: Any, end: Any, *rest: Any) -> Any:
        walked.append((int(begin), int(end)))
        return walk(begin, end, *rest)

    monkeypatch.setattr(puzzles, "walk", watched)
    puzzles.in_splits(*paged(length, 8)[0], chunk)
    splits = [(first, min(first + chunk, length)) for first in range(0, length, chunk)]
    assert walked == splits, f"{length} keys in splits of {chunk}: from where to where each program walks"
