"""Attention for mixed steps: its plan, its result against the reference, and the compiled kernels."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phase1_kv_pool.kernels import prepare_triton
from phase1_kv_pool.lab import report
from phase2_prefill_decode.kernels import attention
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase3_chunked_prefill.kernels.plan import plan
from tests.phase1_kv_pool.support import bits, needs_gpu
from tests.phase2_prefill_decode.attention_cases import EDGES, ONE_KV_HEAD, TOLERANCE, Case, Inputs, decodes, prompts

HALF = torch.float16 if prepare_triton() else torch.bfloat16

CHUNKS = {
    # the last token before a chunk is one short of a page or of a tile, at its end, or one past it
    **{
        f"behind_{context}": Case([context + 20, context + 33, context + 1], [20, 33, 1], **ONE_KV_HEAD)
        for context in (0, 1, 15, 16, 17, 63, 64, 65, 128)
    },
    **{
        f"of_{new}": Case([100 + new, 7 + new, new, 300], [new, new, new, 1], **ONE_KV_HEAD)
        for new in (8, 9, 31, 32, 33, 64, 65)
    },
    "of_pages_of_64": Case([64, 63, 129, 200, 40], [30, 63, 65, 1, 20], page_size=64),
    "of_pages_of_1": Case([64, 63, 129], [30, 63, 1], page_size=1),
    "far_behind": Case([1500, 600], [40, 1], **ONE_KV_HEAD),
    "with_drafts": Case([40, 70, 33, 200, 530], [4, 3, 2, 60, 1]),
    "with_nothing_new": Case([40, 70, 33], [0, 50, 0]),
    "only_drafts": Case([40, 70, 530], [5, 8, 1]),
    "all_by_themselves": Case([90], [70]),
    **{
        f"window_{n}": Case([150, 90, 700, 64], [40, 90, 1, 30], window=n, **ONE_KV_HEAD)
        for n in (1, 16, 33, 64, 100, 4096)
    },
    **{f"gqa_{n}": Case([90, 40, 33], [50, 1, 33], heads=2 * n, kv_heads=2) for n in (1, 3, 7, 8)},
    "many_heads_of_one": Case([90, 40], [50, 1], heads=40, kv_heads=1),
    **{f"heads_of_{n}": Case([90, 40, 33], [50, 1, 33], head_dim=n) for n in (80, 96, 128, 256)},
}


def check(case: Case, inputs: Inputs) -> None:
    found, dtype = case.run(ATTEND.load("triton"), inputs), inputs.query.dtype
    case.assert_close(found, case.oracle(inputs), TOLERANCE[dtype])


def with_sizes(case: Case, inputs: Inputs) -> Inputs:
    """The same batch with the sizes that the host knows."""
    sizes = tuple(zip(case.new, case.lengths, strict=True))
    return replace(inputs, metadata=replace(inputs.metadata, sizes=sizes))


# Interpreting Triton is slow: in half precision, one case of each kind.
HALVES = ("behind_16", "of_33", "with_drafts", "window_33", "gqa_7", "heads_of_128") if prepare_triton() else CHUNKS


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *(pytest.param(torch.float32, case, id=f"float32-{name}") for name, case in CHUNKS.items()),
        *(pytest.param(HALF, CHUNKS[name], id=f"half-{name}") for name in HALVES),
    ],
)
def test_chunks_attend_to_their_context_and_themselves(dtype: torch.dtype, case: Case) -> None:
    check(case, with_sizes(case, case.inputs("triton", dtype)))


EDGES_OF_PHASE_2 = {
    name: case
    for name, case in EDGES.items()
    if len(set(case.new)) > 1 or name.startswith(("decodes_window", "around"))
}


@pytest.mark.parametrize("case", EDGES_OF_PHASE_2.values(), ids=EDGES_OF_PHASE_2.keys())
def test_mixed_steps_match_the_oracle_at_the_edges_of_phase_2(case: Case) -> None:
    check(case, with_sizes(case, case.inputs("triton", HALF)))


@st.composite
def batches(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 140), min_size=1, max_size=5))
    new = [draw(st.integers(0, length) | st.just(1)) for length in lengths]
    new[0] = max(new[0], 1)
    kv_heads = draw(st.integers(1, 2))
    return Case(
        lengths,
        new,
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 64, 80])),
        page_size=draw(st.sampled_from([1, 7, 16, 64])),
        window=draw(st.none() | st.integers(1, 150)),
    )


@settings(max_examples=20)
@given(case=batches())
def test_random_mixed_steps_match_the_oracle(case: Case) -> None:
    check(case, with_sizes(case, case.inputs("triton", torch.float32)))


@pytest.mark.skipif(not prepare_triton(), reason="compiled kernels call no Python")
@pytest.mark.parametrize(("context", "full"), [(0, 0), (94, 80), (95, 96), (96, 96)])
def test_full_tiles_are_walked_without_a_mask(context: int, full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 20 tokens behind a context; tiles of 16. A tile is full if the first row sees all its keys."""
    from phase3_chunked_prefill.kernels.triton import ragged

    walks: list[tuple[int, int, bool]] = []
    walk = ragged.walk

    def watched(begin: object, end: object, *given: object) -> object:
        if int(end) > int(begin):  # type: ignore[call-overload]
            walks.append((int(begin), int(end), bool(given[-1])))  # type: ignore[call-overload]
        return walk(begin, end, *given)

    monkeypatch.setattr(ragged, "walk", watched)
    case = Case([context + 20], [20], heads=1, kv_heads=1)
    check(case, with_sizes(case, case.inputs("triton", torch.float32)))
    wanted = [(0, full, False), (full, context + 20, True)]
    assert walks == [one for one in wanted if one[1] > one[0]], "(first key, end, masked) of each walk"


def test_a_chunk_and_a_decode_are_bit_identical_in_any_batch() -> None:
    case = Case([130, 33, 200, 64, 600], [100, 1, 30, 64, 1])
    inputs, attend = with_sizes(case, case.inputs("triton", HALF)), ATTEND.load("triton")
    together = case.run(attend, inputs).split(case.new)
    queries = inputs.query.split(case.new)
    for number, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, new], dtype=torch.int32, device=inputs.query.device),
            seq_lens=inputs.metadata.seq_lens[number : number + 1],
            page_table=inputs.metadata.page_table[number : number + 1],
            max_seqlen_q=new,
            max_seqlen_k=length,
            sizes=((new, length),),
        )
        alone = attend(queries[number], inputs.keys, inputs.values, metadata, case.scaling, None)
        same = torch.equal(bits(alone), bits(together[number]))
        assert same, f"sequence {number} of {length} tokens, {new} of them new, has another result alone"


@pytest.mark.parametrize(
    "case", [decodes(40, 600, 33), Case([40, 90], [8, 1]), decodes(700, window=50)], ids=["decodes", "drafts", "window"]
)
def test_a_short_step_needs_no_sizes_on_the_host_and_has_the_same_bits_with_them(case: Case) -> None:
    inputs, attend = case.inputs("triton", HALF), ATTEND.load("triton")
    check(case, inputs)
    assert torch.equal(bits(case.run(attend, inputs)), bits(case.run(attend, with_sizes(case, inputs))))


def test_a_long_step_without_sizes_is_refused_not_read_from_the_device() -> None:
    case = Case([130, 33], [100, 1])
    with pytest.raises(
        ValueError, match="a step with more than 8 new tokens of a sequence needs the sizes on the host"
    ):
        check(case, case.inputs("triton", torch.float32))


def test_a_step_is_planned_once_per_window_size() -> None:
    inputs = with_sizes(case := Case([60, 33], [20, 1]), Case([60, 33], [20, 1]).inputs("triton", torch.float32))
    for window in (None, 40, None, 40):
        check(replace(case, window=window), inputs)
    assert len(inputs.metadata.plans) == 2
    assert replace(inputs.metadata).plans == {}


def test_the_other_backends_are_those_of_phase_2() -> None:
    for backend in ("reference", "cpu"):
        assert ATTEND.load(backend) is attention.ATTEND.load(backend)


# The plan


def seen_by(piece: tuple[int, int], sizes: list[tuple[int, int]], block: int) -> int:
    sequence, first = piece
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
def test_every_new_token_is_in_one_piece(
    sizes: list[tuple[int, int]], group: int, block: int, window: int | None
) -> None:
    found = plan(tuple(sizes), group, block, window)
    blocks = [tuple(row) for row in found.blocks.tolist()]
    long = {sequence for sequence, _ in blocks}
    short = {number for number, (new, _) in enumerate(sizes) if 0 < new <= found.queries}
    assert short | long == {number for number, (new, _) in enumerate(sizes) if new > 0}, "a sequence has no kernel"
    assert not short & long, "a sequence is computed by both kernels"
    assert found.longest == max((sizes[n][1] for n in short), default=0)
    assert (found.queries == 0) == (not short)
    for sequence in long:
        firsts = sorted(first for owner, first in blocks if owner == sequence)
        assert firsts == list(range(0, sizes[sequence][0], block)), f"the blocks of sequence {sequence}"
    if window is None:
        work = [seen_by(piece, sizes, block) for piece in blocks]
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
    found = plan(tuple((n, 600) for n in new), group, 32, None)
    assert sorted(set(new) - {new[sequence] for sequence in found.blocks[:, 0].tolist()}) == short
    assert found.queries in (0, 1, 2, 4, 8, 16)
    assert max(short, default=0) <= found.queries <= max(16 // group, 1)


def test_blocks_that_see_the_most_keys_go_first() -> None:
    found = plan(((64, 64), (64, 1000), (1, 5000)), 4, 32, None)
    assert found.blocks.tolist() == [[1, 32], [1, 0], [0, 32], [0, 0]]
    windowed = plan(((64, 64), (64, 1000), (1, 5000)), 4, 32, 20)
    assert windowed.blocks.tolist() == [[0, 32], [1, 0], [1, 32], [0, 0]], "with a window all see about as many keys"


# Compilation


@pytest.fixture(scope="module")
def compiled() -> list[report.Compiled]:
    return report.compiled("phase3_chunked_prefill.lab")


def test_every_kernel_compiles_well_for_every_gpu(compiled: list[report.Compiled]) -> None:
    assert [kernel for kernel in compiled if kernel.faults or kernel.stack] == []
    found = [k for k in compiled if k.kernel.startswith("ragged bf16 ")]
    assert {kernel.architecture for kernel in found} == {80, 90, 100}
    assert all(kernel.async_copies and kernel.tensor_cores for kernel in found)
    assert {kernel.kernel.split()[0] for kernel in compiled} == {"ragged", "decode"}


def test_every_kernel_fits_the_shared_memory_of_a_small_gpu(compiled: list[report.Compiled]) -> None:
    """An L4 or an RTX 4090 has 99 KiB for a program, where an A100 has 163. More is refused at the launch."""
    assert [kernel for kernel in compiled if kernel.architecture == 80 and kernel.shared > 99 * 1024] == []


@pytest.mark.slow
def test_all_shapes_compile_well() -> None:
    found = report.compiled("phase3_chunked_prefill.lab", "--all")
    assert len(found) > 700
    assert [kernel for kernel in found if kernel.faults or kernel.stack] == []


@pytest.mark.gpu
@needs_gpu
def test_a_long_step_on_a_gpu() -> None:
    case = Case([8192, 3000, 700, 64], [2048, 1, 1, 64], heads=32, kv_heads=8, head_dim=128, page_size=64)
    check(case, with_sizes(case, case.inputs("triton", torch.bfloat16)))


def test_prompts_alone_need_no_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from phase3_chunked_prefill.kernels.triton import ragged

    def refuses(*arguments: object, **options: object) -> None:
        raise AssertionError("the decode kernel was launched")

    monkeypatch.setattr(ragged, "decode", refuses)
    case = prompts(40, 90)
    check(case, with_sizes(case, case.inputs("triton", torch.float32)))
