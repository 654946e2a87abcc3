"""Packed batches: the position, slot and sequence of every token, as tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.sampling.processors import Work
from phase2_prefill_decode.step.packed import pack, tokens_of
from tests.phase2_prefill_decode.steps import loaded

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


def rows(packed: StepTensors) -> list[tuple[int, int, int]]:
    return list(zip(packed.tokens.tolist(), packed.positions.tolist(), packed.slots.tolist(), strict=True))


@settings(max_examples=150)
@given(batches())
def test_every_token_has_its_position_and_its_slot_and_every_sequence_its_rows_and_pages(
    given_: tuple[Batch, PagedCache],
) -> None:
    batch, cache = given_
    packed = loaded(batch, cache)
    starts = packed.metadata.cu_seqlens_q.tolist()
    assert (starts[0], starts[-1]) == (0, batch.num_tokens), "cu_seqlens_q goes from 0 to the tokens of the step"
    assert len(packed.tokens) == batch.num_tokens, "a row for each token, without padding"
    for number, piece in enumerate(batch.slices):
        name, table = piece.request.id, cache.table(piece.request)
        wanted = [
            (position + 100 * int(name[1:]), position, table[position // cache.page_size] * cache.page_size)
            for position in range(piece.start, piece.stop)
        ]
        found = rows(packed)[starts[number] : starts[number + 1]]
        wanted = [(token, position, slot + position % cache.page_size) for token, position, slot in wanted]
        assert found == wanted, f"the (token, position, slot) of tokens {piece.start} to {piece.stop} of {name}"
        pages = -(-piece.stop // cache.page_size)
        assert packed.metadata.page_table[number, :pages].tolist() == table[:pages], f"the pages of {name}"
    assert packed.metadata.seq_lens.tolist() == [piece.stop for piece in batch], "the tokens of each sequence"
    assert packed.metadata.max_seqlen_k == max(piece.stop for piece in batch), "the most tokens of a sequence"
    assert packed.metadata.max_seqlen_q == max(piece.length for piece in batch), "the most new tokens of a sequence"
    last = list(range(batch.num_tokens)) if packed.last is None else packed.last.tolist()
    ends = [starts[number + 1] - 1 for number, piece in enumerate(batch.slices) if piece.completes]
    assert last == ends, "logits are needed of the last token of each slice that completes its request"


def a_decode_a_chunk_and_a_prompt() -> tuple[Batch, PagedCache]:
    """r1 has 5 tokens of a prompt and one of its answer, r2 a prompt of 10, of which 4 are computed, r3 one of 3.
    Their rows on the device are 1, 2 and 0."""
    cache = PagedCache(20, 4)
    prompt, decode, chunk = running(cache, 3, 3, 0, 0), running(cache, 1, 5, 1, 5), running(cache, 2, 10, 0, 4)
    return Batch((Slice(decode, 5, 1), Slice(chunk, 4, 3), Slice(prompt, 0, 3))), cache


def test_a_decode_a_chunk_and_a_prompt_are_packed_in_one_row() -> None:
    batch, cache = a_decode_a_chunk_and_a_prompt()
    step = pack(batch, cache, width=6)
    r1, r2, r3 = (cache.table(piece.request) for piece in batch)
    assert step.tokens == [105, 204, 205, 206, 300, 301, 302], "the tokens of r1, r2 and r3, in this order"
    assert step.positions == [5, 4, 5, 6, 0, 1, 2], "of each token in its own sequence"
    slots = [4 * r1[1] + 1, *(4 * r2[1] + i for i in range(3)), *(4 * r3[0] + i for i in range(3))]
    assert step.slots == slots, "page times 4 plus the place in the page, of each token"
    assert step.cu_seqlens_q == [0, 1, 4, 7], "where each slice begins, and the end of the last"
    assert step.last == [0, 6], "r2 is in the middle of its prompt: none of its rows needs logits"
    assert step.slice_numbers == (0, 2), "the numbers of the slices that complete their requests, r1 and r3"
    assert step.table_rows == [1, 2, 0], "the rows of their page tables on the device"
    assert step.newest_rows == [1, 0], "the rows on the device of r1 and r3, which get a token"
    assert step.seq_lens == [6, 7, 3], "the tokens of each sequence up to the end of its slice"
    assert step.sizes == ((1, 6), (3, 7), (3, 3)), "(new tokens, all tokens) of each slice"
    assert (step.max_seqlen_q, step.max_seqlen_k) == (3, 7), "the most new tokens, and the most tokens, of a slice"
    assert not step.all_logits, "only two of the seven rows need logits"


def test_only_changed_entries_of_page_tables_are_sent() -> None:
    batch, cache = a_decode_a_chunk_and_a_prompt()
    step = pack(batch, cache, width=6)
    tables = {6 * cache.row(piece.request): cache.table(piece.request) for piece in batch}
    entries = {first + i: page for first, table in tables.items() for i, page in enumerate(table)}
    assert dict(zip(step.changed, step.pages, strict=True)) == entries, "entry row * width + i is page i of a new table"
    assert pack(batch, cache, 6).pages == step.pages, "a step that fails is packed again: `pack` clears nothing"
    cache.changed.clear()
    assert (pack(batch, cache, 6).changed, pack(batch, cache, 6).pages) == ([], []), "nothing has changed since"
    grown = batch.slices[1].request
    before = len(cache.table(grown))
    cache.grow(grown, 4 * before + 1)
    step = pack(batch, cache, width=6)
    assert (step.changed, step.pages) == ([6 * cache.row(grown) + before], cache.table(grown)[before:]), "one new page"


def wanting(*rows: int) -> Work:
    """Work that wants the hidden states of these tokens."""
    work = Work()
    work.rows = rows
    return work


def test_rows_that_a_processor_wants_come_after_the_last_rows() -> None:
    batch, cache = a_decode_a_chunk_and_a_prompt()
    assert pack(batch, cache, 6, works=[wanting(1, 2, 3, 4, 5)]).last == [0, 6, 1, 2, 3, 4, 5]
    alone = Batch((Slice(batch.slices[2].request, 0, 3),))
    step = pack(alone, cache, 6, works=[wanting(0, 1)])
    assert step.last == [2, 0, 1]
    assert not step.all_logits, "these are all rows, but not in their order"


IN_FLIGHT = {  # tokens of the prompt, known tokens of the answer, the slice, and what it is packed as; the row is 2
    "a prompt": (5, 0, (0, 5), [300, 301, 302, 303, 304]),
    "a chunk": (5, 0, (1, 3), [301, 302, 303]),
    "a decode": (5, 2, (6, 1), [306]),
    "a chunk of one token after a preemption": (5, 2, (3, 1), [303]),
    "a decode of a token in flight": (5, 2, (7, 1), [-3]),
    "the first token of an answer, in flight": (5, 0, (5, 1), [-3]),
    "all tokens again after a preemption": (3, 2, (0, 5), [300, 301, 302, 303, 304]),
    "all tokens again, and one in flight": (3, 2, (1, 5), [301, 302, 303, 304, -3]),
}


@pytest.mark.parametrize(("prompt", "output", "piece", "wanted"), IN_FLIGHT.values(), ids=IN_FLIGHT)
def test_a_token_in_flight_is_packed_as_the_row_that_will_have_it(
    prompt: int, output: int, piece: tuple[int, int], wanted: list[int]
) -> None:
    cache = PagedCache(20, 4)
    *_, request = (running(cache, number, prompt, output, prompt + output - 1) for number in (1, 2, 3))
    assert cache.row(request) == 2
    got, (start, length) = tokens_of(Slice(request, *piece), cache), piece
    assert got == wanted, (
        f"{request.total} tokens are known, the row is 2: from {start}, {length} tokens are {wanted}, not {got}"
    )


@pytest.mark.parametrize(
    ("start", "length", "tokens"),
    [(6, 4, [106, 7, 8, 9]), (4, 6, [104, 105, 106, 7, 8, 9]), (8, 1, [8]), (8, 2, [8, 9])],
    ids=["a decode", "more than a decode", "one of them", "two of them"],
)
def test_a_token_beyond_a_request_is_packed_behind_it_and_each_has_a_row_to_draw_from(
    start: int, length: int, tokens: list[int]
) -> None:
    cache = PagedCache(20, 4)
    request = running(cache, 1, 5, 2, 6)
    cache.grow(request, 12)
    step = pack(Batch((Slice(request, start, length, (7, 8, 9)),)), cache, 6)
    drawn = min(length, 4)
    assert step.tokens == tokens, (
        f"7 are known, then (7, 8, 9): from {start}, {length} tokens are {tokens}, not {step.tokens}"
    )
    assert step.last == [*range(length)][-drawn:], "of the newest token and of those beyond it"
    assert step.slice_numbers == (0,) * drawn, "each of these rows belongs to slice 0"


def test_page_tables_of_different_lengths_are_rows_of_one_width() -> None:
    cache = PagedCache(20, 4)
    requests = [running(cache, number, 6, 0, 0) for number in (1, 2)]
    cache.grow(requests[0], 60)
    packed = loaded(Batch(tuple(Slice(request, 0, 6) for request in reversed(requests))), cache)
    short, long = packed.metadata.page_table.tolist()
    assert (long, short[:2]) == (cache.table(requests[0]), cache.table(requests[1])), "in the order of the slices"


def test_a_batch_of_decodes_selects_no_rows() -> None:
    cache = PagedCache(20, 4)
    requests = [running(cache, number, 5, 1, 5) for number in (1, 2)]
    packed = loaded(Batch(tuple(Slice(request, 5, 1) for request in requests)), cache)
    assert packed.last is None, "two decodes are two rows, and both need logits: there is nothing to select"
    assert packed.metadata.max_seqlen_q == 1, "the most new tokens of a sequence"
