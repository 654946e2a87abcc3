"""The device state: its page tables are always those of the cache, and a token in flight is read from its row."""

import random
from dataclasses import dataclass

import pytest
import torch

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.extras.piecewise import token_counts
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import DecodeGraphs, batch_sizes
from phase2_prefill_decode.step.packed import PackedStep, join, pack
from phase4_radix.prefix_cache import PrefixCache
from tests.phase2_prefill_decode.steps import NothingWaits

CPU = torch.device("cpu")


def load(batch: Batch, cache: PagedCache, state: DeviceState) -> StepTensors:
    state.reserve(cache)
    step = pack(batch, cache, state.width)
    packed = state.load(step, step.to(CPU))
    cache.changed.clear()
    return packed


def attached(cache: PagedCache, name: str = "a", room: int = 8) -> Request:
    """A running request of the tokens 5, 6, 7, of which 2 are computed, with pages for `room` tokens."""
    request = Request(name, (5, 6, 7))
    request.admit(0.0)
    cache.attach(request)
    cache.grow(request, room)
    request.advance(0, 2)
    return request


@pytest.mark.parametrize("kind", [PagedCache, PrefixCache])
@pytest.mark.parametrize("fixed", [False, True])
def test_after_every_step_the_device_has_the_page_tables_of_the_cache(kind: type[PagedCache], fixed: bool) -> None:
    """Requests come, grow, share prefixes, swap their pages for cached ones, and leave; rows are used again."""
    rng, cache = random.Random(1), kind(400, 4)
    state = DeviceState(CPU, rows=12, pages=40) if fixed else DeviceState(CPU)
    live: list[Request] = []
    for number in range(300):
        if len(live) < 12 and rng.random() < 0.4:
            request = Request(f"r{number}", (7,) * rng.randint(1, 60), SamplingParams(max_tokens=90))
            request.admit(0.0)
            found = cache.attach(request)
            if found:
                request.advance(0, found)
            live.append(request)
        chosen = rng.sample(live, rng.randint(1, len(live))) if live else []
        for request in chosen:
            cache.grow(request, request.total)
        if chosen:
            batch = Batch(tuple(Slice(one, one.computed, one.total - one.computed) for one in chosen))
            packed = load(batch, cache, state)
            for row, (request, _, stop, _) in zip(packed.metadata.page_table.tolist(), batch.slices, strict=True):
                table = cache.table(request)
                assert row[: len(table)] == table[: len(row)], f"step {number}: the page table of {request.id}"
                assert len(row) >= -(-stop // 4), f"step {number}: all pages of {request.id} that the step reads"
                assert cache.row(request) < state.scratch_row, (
                    f"step {number}: the last row is scratch, not a request's"
                )
            assert len(state.newest) == len(state.page_table), "a newest token for each page table"
            for piece in batch:
                piece.request.advance(piece.start, piece.length)
                cache.publish(piece.request)
                piece.request.append(7, 0.0)
        for request in [one for one in live if one.total > 80 or rng.random() < 0.05]:
            cache.release(request)
            live.remove(request)
    if isinstance(cache, PrefixCache):
        assert cache.counts.duplicates > 0, "no page of a table was ever replaced"


def test_a_token_in_flight_is_the_newest_of_its_row() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU)
    first, second = (attached(cache, name) for name in "ab")
    packed = load(Batch((Slice(first, 2, 1), Slice(second, 2, 1))), cache, state)
    assert packed.tokens.tolist() == [7, 7]
    state.newest.index_copy_(0, packed.newest_rows, torch.tensor([41, 42]))
    packed = load(Batch((Slice(second, 3, 1), Slice(first, 2, 2))), cache, state)
    assert packed.tokens.tolist() == [42, 7, 41], "b's newest token, then a's last known one and its newest"
    assert packed.positions.tolist() == [3, 2, 3]


def test_a_step_is_completed_without_waiting_for_the_device() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU)
    request = attached(cache)
    state.reserve(cache)
    step = pack(Batch((Slice(request, 2, 2),)), cache, state.width)
    arrays = step.to(CPU)
    with NothingWaits():
        packed = state.load(step, arrays)
    assert packed.last is not None
    state.newest[0] = 9
    assert state.load(step, arrays).tokens.tolist() == [7, 9], "the token in flight is read when the step is loaded"
    assert packed.metadata.page_table.tolist() == [cache.table(request)]


def test_a_state_of_fixed_size_refuses_what_does_not_fit() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU, rows=2, pages=3)
    attached(cache, room=13)
    with pytest.raises(RuntimeError, match="needs 1 rows of 4 pages; there are 2 of 3"):
        state.reserve(cache)
    with pytest.raises(ValueError, match="fixed size"):
        DecodeGraphs(DeviceState(CPU), 4, 100)


def test_padding_reads_and_writes_nothing_of_a_request() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU, rows=4, pages=5)
    request = attached(cache, room=3)
    graphs = DecodeGraphs(state, 4, 20)
    whole = pack(Batch((Slice(request, 2, 1),)), cache, state.width)
    padded = graphs.pad(whole, 4)
    before = state.page_table.clone()
    packed = state.load(padded, padded.to(CPU))
    alone = state.load(whole, whole.to(CPU))
    assert packed.tokens.tolist() == [7, 0, 0, 0], "a padding slice computes token 0"
    assert packed.positions.tolist() == [2, 0, 0, 0], "at position 0"
    assert packed.slots.tolist() == [*alone.slots.tolist(), -1, -1, -1], "slot -1: nothing is stored"
    assert packed.metadata.seq_lens.tolist() == [3, 0, 0, 0], "a padding sequence has no keys"
    assert packed.metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4], "each slice has one token"
    assert packed.last is None, "each slice of a recorded step has logits"
    assert packed.metadata.sizes == (), "the host knows nothing of the sequences of a recorded step"
    assert packed.metadata.max_seqlen_k == 20, "the context that it was recorded for"
    assert packed.newest_rows.tolist() == [0, 4, 4, 4], "row 4 is scratch"
    assert padded.table_rows == [0, 4, 4, 4], "row 4 is scratch"
    assert torch.equal(state.page_table[1:4], before[1:4]), "padding changes no page table of a request"
    assert state.page_table[0, 0] == cache.table(request)[0]
    again = pack(Batch((Slice(request, 2, 1),)), cache, state.width)
    assert torch.equal(join(whole.arrays), join(again.arrays)), "a copy"
    empty = graphs.pad(PackedStep.empty(), 4)
    sizes = [[len(part) for part in step.to(CPU)] for step in (padded, empty)]
    assert sizes[0] == sizes[1], "every padded step has arrays of one size"
    assert padded.all_logits


@dataclass(frozen=True)
class Decodes:
    """A step of so many slices: the computed tokens of each, those that it computes, its prompt and its pages."""

    count: int
    start: int = 4
    length: int = 1
    prompt: int = 5
    changed: int = 0  # entries of page tables that the device does not have yet, for each slice

    def pack(self, state: DeviceState) -> PackedStep:
        cache = PagedCache(200, 4)
        pieces = []
        for number in range(self.count):
            request = Request(f"r{number}", tuple(range(self.prompt)))
            cache.attach(request)
            cache.grow(request, max(self.prompt, 4 * self.changed))
            pieces.append(Slice(request, self.start, self.length))
        cache.changed = {name: len(cache.tables[name]) - self.changed for name in cache.changed if self.changed}
        return pack(Batch(tuple(pieces)), cache, state.width)


GRAPHS = {  # recorded are steps of 1, 2, 4 and 8 decodes, of up to 40 tokens
    "one": (Decodes(1), 1),
    "three": (Decodes(3), 4),
    "eight": (Decodes(8), 8),
    "more than the largest": (Decodes(9), 0),
    "prompts of one token": (Decodes(2, 0, 1, 1), 2),
    "prompts": (Decodes(2, 0, 5, 5), 0),
    "chunks of one token": (Decodes(2, 2, 1, 5), 0),
    "of 40 tokens": (Decodes(2, 39, 1, 40), 2),
    "of 41 tokens": (Decodes(2, 40, 1, 41), 0),
    "two changed pages each": (Decodes(2, changed=2), 2),
    "three changed pages each": (Decodes(2, changed=3), 4),
    "ten changed pages each": (Decodes(2, changed=10), 0),
}


@pytest.mark.parametrize(("step", "size"), GRAPHS.values(), ids=GRAPHS)
def test_a_step_is_replayed_by_the_smallest_graph_that_holds_it(step: Decodes, size: int) -> None:
    state = DeviceState(CPU, rows=16, pages=12)
    graphs = DecodeGraphs(state, 4, 40)
    graphs.record(lambda step, lists: None, [1, 2, 4, 8], lambda replay: replay)  # type: ignore[arg-type, return-value]
    got = graphs.size_for(step.pack(state))
    assert got == size, f"graphs of 1, 2, 4 and 8 decodes, of up to 40 tokens; {step}: {size} (0 is none), not {got}"


def test_a_state_without_graphs_launches_every_step_kernel_by_kernel() -> None:
    state = DeviceState(CPU, rows=16, pages=12)
    assert DecodeGraphs(state, 4, 40).size_for(Decodes(1).pack(state)) == 0


@pytest.mark.parametrize("most", [1, 2, 3, 5, 64, 100, 256, 300, 1024])
def test_no_batch_is_padded_by_more_than_an_eighth_of_it_or_seven(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    for batch in range(1, most + 1):
        assert min(size for size in sizes if size >= batch) - batch <= max(7, batch // 8)
    assert len(sizes) <= 3 + 32 + 48 + 1


@pytest.mark.parametrize("most", [2, 200, 2048, 5000, 131_072])
def test_few_numbers_of_tokens_are_recorded_and_no_step_is_padded_by_256(most: int) -> None:
    counts = token_counts(most)
    for tokens in range(1, min(most, 4096) + 1):
        assert 0 <= min(count for count in counts if count >= tokens) - tokens < 256
    assert len(counts) <= 18, "each has a graph for every layer, whatever the budget of a step"
