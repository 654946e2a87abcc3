"""The device state: its page tables are always those of the cache, and a token in flight is read from its row."""

import random

import pytest
import torch

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.device_state import DeviceState
from phase2_prefill_decode.graphs import DecodeGraphs, batch_sizes
from phase2_prefill_decode.packed import HostStep, Packed, pack
from phase4_radix.prefix_cache import PrefixCache

CPU = torch.device("cpu")


def load(batch: Batch, cache: PagedCache, state: DeviceState) -> Packed:
    state.reserve(cache)
    step = pack(batch, cache, state.width)
    packed = state.load(step, step.to(CPU), cache.page_size)
    cache.changed.clear()
    return packed


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
            for row, (request, _, _) in zip(packed.metadata.page_table.tolist(), batch.slices, strict=True):
                table = cache.table(request)
                assert row[: len(table)] == table[: len(row)]
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
    first, second = (Request(name, (5, 6, 7)) for name in ("a", "b"))
    for request in (first, second):
        request.admit(0.0)
        cache.attach(request)
        cache.grow(request, 8)
        request.advance(0, 2)
    packed = load(Batch((Slice(first, 2, 1), Slice(second, 2, 1))), cache, state)
    assert packed.tokens.tolist() == [7, 7]
    state.newest.index_copy_(0, packed.drawn, torch.tensor([41, 42]))
    packed = load(Batch((Slice(second, 3, 1), Slice(first, 2, 2))), cache, state)
    assert packed.tokens.tolist() == [42, 7, 41]
    assert packed.positions.tolist() == [3, 2, 3]


def test_a_state_of_fixed_size_refuses_what_does_not_fit() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU, rows=2, pages=3)
    request = Request("a", (5,) * 13)
    cache.attach(request)
    cache.grow(request, 13)
    with pytest.raises(RuntimeError, match="needs 1 rows of 4 pages; there are 2 of 3"):
        state.reserve(cache)
    with pytest.raises(ValueError, match="fixed size"):
        DecodeGraphs(DeviceState(CPU), 4, 100)


def test_padding_reads_and_writes_nothing_of_a_request() -> None:
    cache, state = PagedCache(20, 4), DeviceState(CPU, rows=4, pages=5)
    request = Request("a", (5, 6, 7))
    request.admit(0.0)
    cache.attach(request)
    cache.grow(request, 3)
    request.advance(0, 2)
    graphs = DecodeGraphs(state, 4, 20)
    whole = pack(Batch((Slice(request, 2, 1),)), cache, state.width)
    padded = graphs.pad(whole, 4)
    before = state.page_table.clone()
    packed = state.load(padded, padded.to(CPU), 4)
    alone = state.load(whole, whole.to(CPU), 4)
    assert packed.tokens.tolist() == [7, 0, 0, 0]
    assert packed.slots.tolist() == [*alone.slots.tolist(), -1, -1, -1]
    assert packed.metadata.seq_lens.tolist() == [3, 0, 0, 0]
    assert packed.metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert packed.metadata.sizes == ()
    assert packed.drawn.tolist() == [0, 4, 4, 4], "row 4 is scratch"
    assert torch.equal(state.page_table[1:], before[1:])
    assert state.page_table[0, 0] == cache.table(request)[0]
    assert [len(one) for one in padded.parts[0]] == [len(one) for one in graphs.pad(HostStep.empty(), 4).parts[0]]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 64, 100, 256, 300, 1024])
def test_no_batch_is_padded_by_more_than_an_eighth_of_it_or_seven(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    for batch in range(1, most + 1):
        assert min(size for size in sizes if size >= batch) - batch <= max(7, batch // 8)
    assert len(sizes) <= 3 + 32 + 48 + 1
