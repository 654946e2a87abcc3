"""The Triton kernels of this phase: how they compile, and properties of theirs alone."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phase1_kv_pool.kernels import prepare_triton
from phase1_kv_pool.lab import report
from phase1_kv_pool.lab.ahead import ARCHITECTURES, Compiled
from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.backend import triton_backend
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.triton import attention, decode, prefill, splits
from phase2_prefill_decode.kernels.triton.splits import Splits, splits_of
from phase2_prefill_decode.kernels.triton.tuning import Tuning
from tests.phase1_kv_pool.support import bits, device_of, needs_gpu
from tests.phase2_prefill_decode.attention_cases import NO_PAGE, TOLERANCE, Case, Inputs, decodes, prompts

INTERPRETED = prepare_triton()
HALF = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return report.compiled("phase2_prefill_decode.lab")


def test_every_kernel_compiles_well_for_every_gpu(compiled: list[Compiled]) -> None:
    """No stack; K and V copied asynchronously, into two buffers each; products of half precision on tensor cores."""
    assert [kernel for kernel in compiled if kernel.faults or kernel.stack] == []
    for name in ("decode", "prefill"):
        found = [kernel for kernel in compiled if kernel.kernel.startswith(f"{name} bf16 ")]
        assert {kernel.architecture for kernel in found} == set(ARCHITECTURES)
        assert all(kernel.async_copies and kernel.tensor_cores for kernel in found)
    products = [kernel for kernel in compiled if kernel.kernel.startswith("product") and " bf16," in kernel.kernel]
    assert all(kernel.async_copies and kernel.tensor_cores for kernel in products)
    kinds = {kernel.kernel.split()[0] for kernel in compiled}
    attention, quantized = {"splits", "decode", "join", "prefill"}, {"product", "join_splits", "widen", "quantize_rows"}
    sampling = {"apply_mask", "maxima", "bound", "scan", "choose"}
    assert kinds == {*attention, *quantized, *sampling, "add_norm", "rotate_store", "swiglu"}


def test_the_decode_kernel_needs_no_more_than_its_grid_counts_on(compiled: list[Compiled]) -> None:
    """On a Hopper, three programs of 128 threads a multiprocessor for heads of up to 128; two with keys in 8 bits."""
    one_new = [k for k in compiled if k.kernel.startswith("decode bf16 x") and not k.kernel.endswith(" new")]
    found = [kernel for kernel in one_new if kernel.architecture >= 90]
    assert len(found) > 6
    for kernel in found:
        wide, in_8_bits = " x 256," in kernel.kernel, kernel.kernel.endswith(("int8", "fp8"))
        assert kernel.registers <= (192 if in_8_bits else 200 if wide else 168)
        assert kernel.shared <= 64 * 1024 + 10 * 1024, "the buffers of keys and values, queries and weights"
        if in_8_bits:
            assert 65536 // (128 * 192) == 2 <= 228 * 1024 // (kernel.shared + 1024)
        elif not wide:
            assert 65536 // (128 * 168) == 228 * 1024 // (kernel.shared + 1024) == 3


def test_the_decode_kernel_compiles_for_a_hopper_without_a_stack() -> None:
    kernel, *_ = report.compiled("phase2_prefill_decode.lab", "decode bf16 x 128, pages of 64, group 8")
    assert kernel.architecture == 90
    assert kernel.stack == 0, "registers are spilled to memory, at every turn of the loop perhaps"


def test_every_kernel_fits_the_shared_memory_of_a_small_gpu(compiled: list[Compiled]) -> None:
    """An L4 or an RTX 4090 has 99 KiB for a program, where an A100 has 163. More is refused at the launch."""
    assert [kernel for kernel in compiled if kernel.architecture == 80 and kernel.shared > 99 * 1024] == []


@pytest.mark.slow
def test_all_shapes_compile_well() -> None:
    found = report.compiled("phase2_prefill_decode.lab", "--all")
    assert len(found) > 1600
    assert [kernel for kernel in found if kernel.faults or kernel.stack] == []


# Properties of these kernels alone


def launch(case: Case, inputs: Inputs, chunk: int | None = None) -> Tensor:
    """The result of the decode kernel, which starts out as 7 everywhere."""
    result = torch.full_like(inputs.query, 7.0)
    metadata, tuning = replace(inputs.metadata, sizes=()), None if chunk is None else Tuning(chunk)
    decode.decode(inputs.query, inputs.kv, result, metadata, case.scaling, case.window, tuning)
    return result.cpu()


@pytest.mark.proof
@pytest.mark.parametrize("chunk", [128, 256, 1024])
def test_any_split_size_gives_the_same_result(chunk: int) -> None:
    case = decodes(1, 127, 128, 129, 700, 2300, head_dim=80)
    inputs = case.inputs("triton", HALF)
    case.assert_close(launch(case, inputs, chunk=chunk), case.oracle(inputs), TOLERANCE[HALF])


def test_splits_are_joined_whichever_has_the_maximum() -> None:
    """More splits than are read at once, and queries so large that one key dominates, mostly in a late split."""
    case = decodes(3000, 4100, heads=4, kv_heads=1, spread=8.0)
    inputs = case.inputs("triton", torch.float32)
    scores = (inputs.query.cpu()[1] * inputs.k[1].repeat_interleave(4, 1)).sum(-1)  # [length, heads]
    assert (scores.argmax(0) > 16 * 128).any()
    case.assert_close(launch(case, inputs, chunk=128), case.oracle(inputs), 1e-5)


def splits_table(
    lengths: list[int], new: list[int], sizes: bool = False, **shape: Any
) -> tuple[list[list[int]], Splits]:
    """The rows of the table of splits, and the table."""
    device = device_of("triton")
    starts = torch.tensor([0, *new], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    known = tuple(zip(new, lengths, strict=True)) if sizes else ()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(starts, seq_lens, torch.empty(0), max(new), max(lengths), known)
    options = {"kv_heads": 2, "queries": 1, "chunk": 128, "tile": 32, "window": None, **shape}
    found = splits_of(metadata, **options)
    return found.work[: found.cu_splits[-1]].tolist(), found


def test_the_table_of_splits_has_every_key_once() -> None:
    rows, table = splits_table([0, 1, 128, 129, 300, 40, 70], [1, 1, 1, 1, 1, 0, 3])
    wanted = [
        [0, 0, 0, 1],  # padding: a split without keys
        [1, 0, 1, 1],
        [2, 0, 128, 1],
        [3, 0, 96, 2],  # as equal as whole tiles can be
        [3, 96, 129, 2],
        [4, 0, 128, 3],
        [4, 128, 256, 3],
        [4, 256, 300, 3],
    ]
    assert rows == wanted, f"(sequence, first key, end, splits of the sequence): {rows}"
    assert table.cu_splits.tolist() == [0, 1, 2, 3, 5, 8, 8, 8], "the splits before each sequence; the last have none"
    rows, _ = splits_table([300, 90], [1, 1], window=100)
    assert rows == [[0, 192, 300, 1], [1, 0, 90, 1]], "a window of 100 keys: from the tile on that holds key 200"
    rows, _ = splits_table([9000], [1], kv_heads=32)
    wanted = [[0, first, min(first + 1152, 9000), 8] for first in range(0, 9000, 1152)]
    assert rows == wanted, "with 32 KV heads a sequence has 8 splits at most: they are longer instead"


@settings(max_examples=20)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000)), min_size=1, max_size=6),
    queries=st.sampled_from([1, 4]),
    tile=st.sampled_from([16, 64]),
    kv_heads=st.sampled_from([1, 6, 32]),
    window=st.none() | st.integers(1, 5000),
    sizes=st.booleans(),
)
def test_any_table_of_splits_covers_the_keys_that_are_seen(
    sequences: list[tuple[int, int]], queries: int, tile: int, kv_heads: int, window: int | None, sizes: bool
) -> None:
    new, lengths = [n for n, _ in sequences], [max(n, length) for n, length in sequences]
    options = {"queries": queries, "tile": tile, "kv_heads": kv_heads, "window": window}
    rows, table = splits_table(lengths, new, sizes, **options)
    assert len(rows) <= table.most
    for sequence, (count, length) in enumerate(zip(new, lengths, strict=True)):
        mine = [row for row in rows if row[0] == sequence]
        case = f"sequence {sequence} of {count} new tokens and {length} in all, tile {tile}: {mine}"
        if not 0 < count <= queries:
            assert mine == [], f"{case}: it has no splits"
            continue
        assert {row[3] for row in mine} == {len(mine)}, f"{case}: the number of its splits is in each row"
        assert len(mine) <= min(table.most_of_one, 256 // kv_heads), f"{case}: too many splits"
        assert all(before[2] == after[1] for before, after in pairwise(mine)), f"{case}: a split begins where one ends"
        assert mine[-1][2] == length, f"{case}: the last split ends with the sequence"
        first = 0 if window is None else max(length - count - window + 1, 0)
        assert first - tile < mine[0][1] <= first, (
            f"{case}: it begins at the tile of key {first}, the first that is seen"
        )
        assert all(begin % tile == 0 for _, begin, _, _ in mine), f"{case}: a split begins at a whole tile"
        assert mine == [[sequence, *row[1:]] for row in splits_table([length], [count], **options)[0]], "in any batch"


def test_the_table_of_more_sequences_than_a_program_loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "AT_ONCE", 4)
    lengths = [600, 0, 129, 40, 500, 128, 1, 257, 300, 20]
    rows, table = splits_table(lengths, [1] * len(lengths))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows), "the sequences' rows follow each other in order"
    wanted = [max(-(-length // 128), 1) for length in lengths]
    assert table.cu_splits.diff().tolist() == wanted, f"splits of {lengths} keys, counted 4 sequences at a time"


def test_memory_for_the_results_of_splits_is_bounded_whatever_the_context() -> None:
    """Sequences of up to 40,960 tokens, or of a million: 32 splits each with 8 KV heads."""

    def most(*lengths: int, sizes: bool = False) -> int:
        _, table = splits_table([*lengths], [1] * len(lengths), sizes, kv_heads=8, chunk=256, tile=64)
        return table.most

    assert most(1000, 1000, 1000) == 3 * 4
    assert most(40_960, 40_960, 9) == most(1_000_000, 1_000_000, 9) == 3 * 32
    assert most(1_000_000, 40, 40, sizes=True) == 32 + 2, "exactly so many, where the host knows the lengths"


class Kernel:
    """A kernel that is not run. Keeps the grid of its last launch."""

    grid: tuple[int, ...]
    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid, self.launches = grid, self.launches + 1
        return lambda *arguments, **options: None


def test_the_grids_of_a_captured_step_do_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 sequences of up to 40,960 tokens: as many programs as an H200 runs at once."""
    table, kernel, join = Kernel(), Kernel(), Kernel()
    monkeypatch.setattr(splits, "splits_kernel", table)
    monkeypatch.setattr(decode, "decode_kernel", kernel)
    monkeypatch.setattr(decode, "join_kernel", join)
    h200 = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    count = decode.programs_at_once
    monkeypatch.setattr(decode, "programs_at_once", lambda _, *needs: count(torch.device("cuda", 9), *needs))
    rows = torch.zeros(257, dtype=torch.int32)
    metadata = AttentionMetadata(rows, rows[1:], torch.zeros(256, 2560, dtype=torch.int32), 1, 40_960)
    query, page = torch.empty(256, 32, 128, dtype=torch.bfloat16), torch.empty(1, 8, 16, 128, dtype=torch.bfloat16)
    for _layer in range(2):
        decode.decode(query, KVLayer(page, page), query, metadata, 1.0)
    assert table.launches == 1, "one table serves all layers of a kind"
    assert (table.grid, kernel.grid, join.grid) == ((256,), (8, 3 * 132 // 8), (256, 1, 8))


@pytest.mark.parametrize("window", [None, 300])
def test_a_grid_for_longer_sequences_does_not_change_a_bit(window: int | None) -> None:
    """A captured launch has one."""
    case = decodes(1, 600, 70, 1500, window=window)
    inputs = case.inputs("triton", HALF)
    larger = replace(inputs.metadata, max_seqlen_k=inputs.metadata.max_seqlen_k + 2000)
    assert torch.equal(bits(launch(case, replace(inputs, metadata=larger))), bits(launch(case, inputs)))


@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize("heads", [2, 6, 16])
def test_the_decode_kernel_takes_a_few_new_tokens_a_sequence(heads: int, window: int | None) -> None:
    """As in speculative decoding, or at the end of a prompt: more rows of the same tile."""
    case = Case([8, 5, 140, 70, 1000], [8, 1, 5, 0, 3], heads, window=window)
    inputs = case.inputs("triton", torch.float32)
    case.assert_close(launch(case, inputs, chunk=128), case.oracle(inputs), 1e-5)


def test_two_programs_for_each_head_compute_all_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walks over many rows of the table. A padding row has one, without keys, which makes its result 0."""
    monkeypatch.setattr(decode, "programs_at_once", lambda *_: 4)
    case = decodes(1, 700, 40, 300, 129)
    inputs = case.inputs("triton", torch.float32)
    wanted = case.oracle(inputs)
    inputs.metadata.seq_lens[2], inputs.metadata.page_table[2], wanted[2] = 0, NO_PAGE, 0
    case.assert_close(launch(case, inputs, chunk=128), wanted, 1e-5)


@pytest.mark.parametrize("lengths", [[30, 20, 33, 9], [600, 20, 520, 550]], ids=["one_split", "splits"])
def test_the_decode_kernel_skips_sequences_with_more_new_tokens(lengths: list[int]) -> None:
    case = Case(lengths, [2, 20, 1, 3])
    inputs = case.inputs("triton", torch.float32)
    metadata = replace(inputs.metadata, max_seqlen_q=2)
    found, wanted = launch(case, replace(inputs, metadata=metadata)), case.oracle(inputs)
    wanted[2:22], wanted[23:] = 7, 7
    case.assert_close(found, wanted, 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels call no Python")
@pytest.mark.parametrize(("context", "full"), [(0, 0), (94, 80), (95, 96), (96, 96)])
def test_full_tiles_are_walked_without_a_mask(context: int, full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 20 tokens behind a context; tiles of 16. A tile is full if the first row sees all its keys."""
    walks: list[tuple[int, int, bool]] = []
    original = prefill.walk

    def watched(begin: object, end: object, *given: object) -> object:
        if int(end) > int(begin):  # type: ignore[call-overload]
            walks.append((int(begin), int(end), bool(given[-1])))  # type: ignore[call-overload]
        return original(begin, end, *given)

    monkeypatch.setattr(prefill, "walk", watched)
    case = Case([context + 20], [20], heads=1, kv_heads=1)
    inputs = case.inputs("triton", torch.float32)
    case.assert_close(case.run(triton_backend().attend, inputs), case.oracle(inputs), 1e-5)
    wanted = [(0, full, False), (full, context + 20, True)]
    assert walks == [walk for walk in wanted if walk[1] > walk[0]], "(first key, end, masked) of each walk"


@pytest.mark.parametrize(
    "case", [decodes(40, 600, 33), Case([40, 90], [8, 1]), decodes(700, window=50)], ids=["decodes", "drafts", "window"]
)
def test_a_short_step_needs_no_sizes_on_the_host_and_has_the_same_bits_with_them(case: Case) -> None:
    inputs, attend = case.inputs("triton", HALF), triton_backend().attend
    without = replace(inputs, metadata=replace(inputs.metadata, sizes=()))
    assert torch.equal(bits(case.run(attend, inputs)), bits(case.run(attend, without)))


def test_a_long_step_without_sizes_is_refused_not_read_from_the_device() -> None:
    case = Case([130, 33], [100, 1])
    inputs = case.inputs("triton", torch.float32)
    with pytest.raises(ValueError, match="a step with more than 8 new tokens of a sequence needs the sizes on the"):
        case.run(triton_backend().attend, replace(inputs, metadata=replace(inputs.metadata, sizes=())))


def test_a_step_is_planned_once_per_window_size() -> None:
    case = Case([60, 33], [20, 1])
    inputs = case.inputs("triton", torch.float32)
    for window in (None, 40, None, 40):
        windowed = replace(case, window=window)
        windowed.assert_close(windowed.run(triton_backend().attend, inputs), windowed.oracle(inputs), 1e-5)
    assert len(inputs.metadata.plans) == 2
    assert replace(inputs.metadata).plans == {}


def test_prompts_alone_need_no_decode_kernel() -> None:
    _, short = attention.planned(prompts(40, 90).inputs("triton", torch.float32).metadata, 2, 16, None)
    assert short is None


@pytest.mark.gpu
@needs_gpu
def test_a_long_step_on_a_gpu() -> None:
    case = Case([8192, 3000, 700, 64], [2048, 1, 1, 64], heads=32, kv_heads=8, head_dim=128, page_size=64)
    inputs = case.inputs("triton", torch.bfloat16)
    case.assert_close(case.run(triton_backend().attend, inputs), case.oracle(inputs), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("case", [decodes(40, 17), prompts(40, 17)], ids=["decodes", "prompts"])
def test_queries_may_be_a_view(case: Case) -> None:
    inputs = case.inputs("triton", torch.float32)
    wide = torch.cat((inputs.query, inputs.query), -1)[..., : case.head_dim]
    found = case.run(triton_backend().attend, replace(inputs, query=wide))
    case.assert_close(found, case.oracle(inputs), 1e-5)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_decode_follows_lengths_and_pages() -> None:
    """Captured for up to 2,000 tokens with padding rows, replayed with other lengths and pages in its tensors."""
    short, long = decodes(0, 0, 0), decodes(1900, 1, 600)
    inputs, later = short.inputs("triton", torch.bfloat16), long.inputs("triton", torch.bfloat16)
    pages = torch.zeros_like(later.metadata.page_table)
    metadata = replace(inputs.metadata, page_table=pages, max_seqlen_k=2000, sizes=())
    query, attend = torch.zeros_like(later.query), triton_backend().attend
    arguments = query, later.kv, metadata, long.scaling, None
    attend(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(*arguments)
    graph.replay()
    assert not result.any()
    query.copy_(later.query)
    metadata.seq_lens.copy_(later.metadata.seq_lens)
    pages.copy_(later.metadata.page_table)
    graph.replay()
    long.assert_close(result.cpu(), long.oracle(later), TOLERANCE[torch.bfloat16])
