"""Packed batches: the position, slot and sequence of every token, as tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.packed import Packed
from tests.phase2_prefill_decode.models import loaded

CPU = torch.device("cpu")


def running(cache: PagedCache, number: int, prompt: int, output: int, computed: int) -> Request:
    """A running request with a page table for all its tokens."""
    request = Request(f"r{number}", tuple(100 * number + i for i in range(prompt)))
    request.admit(0.0)
    cache.attach(request)
    cache.grow(request, prompt + output)
    for i in range(output):
        if request.computed < request.total:
            request.advance(request.computed, request.total - request.computed)
        request.append(100 * number + prompt + i, 0.0)
    request.computed = computed
    return request


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, PagedCache]:
    cache = PagedCache(200, draw(st.sampled_from([1, 4, 16])))
    gone = [running(cache, 100 + number, draw(st.integers(1, 40)), 0, 0) for number in range(draw(st.integers(0, 4)))]
    for request in draw(st.permutations(gone)):  # so that the pages of the others are in no order
        cache.release(request)
    pieces = []
    for number in range(1, 1 + draw(st.integers(1, 5))):
        prompt, output = draw(st.integers(1, 20)), draw(st.integers(0, 3))
        computed = draw(st.integers(0, prompt + output - 1))
        request = running(cache, number, prompt, output, computed)
        pieces.append(Slice(request, computed, draw(st.integers(1, request.total - computed))))
    return Batch(tuple(pieces)), cache


def rows(packed: Packed) -> list[tuple[int, int, int]]:
    return list(zip(packed.tokens.tolist(), packed.positions.tolist(), packed.slots.tolist(), strict=True))


@settings(max_examples=150)
@given(batches())
def test_every_token_has_its_position_and_its_slot_and_every_sequence_its_rows_and_pages(
    given_: tuple[Batch, PagedCache],
) -> None:
    batch, cache = given_
    packed = loaded(batch, cache)
    starts = packed.metadata.cu_seqlens_q.tolist()
    assert (starts[0], starts[-1]) == (0, batch.num_tokens)
    assert len(packed.tokens) == batch.num_tokens
    for number, piece in enumerate(batch.slices):
        table = cache.table(piece.request)
        wanted = [
            (position + 100 * int(piece.request.id[1:]), position, table[position // cache.page_size] * cache.page_size)
            for position in range(piece.start, piece.stop)
        ]
        found = rows(packed)[starts[number] : starts[number + 1]]
        assert found == [(token, position, slot + position % cache.page_size) for token, position, slot in wanted]
        pages = -(-piece.stop // cache.page_size)
        assert packed.metadata.page_table[number, :pages].tolist() == table[:pages]
    assert packed.metadata.seq_lens.tolist() == [piece.stop for piece in batch]
    assert packed.metadata.max_seqlen_k == max(piece.stop for piece in batch)
    assert packed.metadata.max_seqlen_q == max(piece.length for piece in batch)
    last = list(range(batch.num_tokens)) if packed.last is None else packed.last.tolist()
    assert last == [starts[number + 1] - 1 for number, piece in enumerate(batch.slices) if piece.completes]


def test_pages_stay_in_the_order_of_their_table() -> None:
    cache = PagedCache(6, 4)
    first, second = (running(cache, number, 8, 0, 0) for number in (1, 2))
    cache.release(first)
    cache.release(second)
    third = running(cache, 3, 24, 0, 0)
    table = cache.table(third)
    assert table != sorted(table)
    packed = loaded(Batch((Slice(third, 0, 24),)), cache)
    assert packed.metadata.page_table.tolist() == [table]


def test_a_page_table_may_be_longer_than_the_step_needs() -> None:
    cache = PagedCache(20, 4)
    request = running(cache, 1, 6, 0, 0)
    cache.grow(request, 60)
    packed = loaded(Batch((Slice(request, 0, 6),)), cache)
    assert packed.metadata.page_table.tolist() == [cache.table(request)[:2]]


def test_a_batch_of_decodes_selects_no_rows() -> None:
    cache = PagedCache(20, 4)
    requests = [running(cache, number, 5, 1, 5) for number in (1, 2)]
    packed = loaded(Batch(tuple(Slice(request, 5, 1) for request in requests)), cache)
    assert packed.last is None
    assert packed.metadata.max_seqlen_q == 1
