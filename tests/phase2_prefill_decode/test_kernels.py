"""The Triton kernels of this phase: how they compile, and properties of theirs alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phase1_kv_pool.kernels import prepare_triton
from phase1_kv_pool.lab import report
from phase1_kv_pool.lab.ahead import ARCHITECTURES, Compiled
from phase2_prefill_decode.kernels.attention import ATTEND
from tests.phase1_kv_pool.support import bits, needs_gpu
from tests.phase2_prefill_decode.attention_cases import TOLERANCE, Case, Inputs, decodes, prompts

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
    kinds = {kernel.kernel.split()[0] for kernel in compiled}
    assert kinds == {"decode", "join", "prefill", "add_norm", "rotate_store", "swiglu"}


def test_three_programs_of_the_decode_kernel_fit_on_a_hopper(compiled: list[Compiled]) -> None:
    """64 Ki registers and 227 KiB of shared memory a multiprocessor, 128 threads a program."""
    found = [k for k in compiled if k.kernel.startswith("decode bf16 x 128") and k.architecture == 90]
    assert len(found) == 5
    for kernel in found:
        assert 3 * 128 * kernel.registers <= 65536
        assert 3 * kernel.shared <= 227 * 1024


@pytest.mark.slow
def test_all_shapes_compile_well() -> None:
    found = report.compiled("phase2_prefill_decode.lab", "--all")
    assert len(found) > 900
    assert [kernel for kernel in found if kernel.faults or kernel.stack] == []


# Properties of these kernels alone


def launch(case: Case, inputs: Inputs, kernel: str = "decode", **options: int) -> Tensor:
    """The result of one of the two kernels, which starts out as 7 everywhere."""
    from phase2_prefill_decode.kernels.triton.decode import decode
    from phase2_prefill_decode.kernels.triton.prefill import prefill

    result = torch.full_like(inputs.query, 7.0)
    function: Callable[..., None] = {"decode": decode, "prefill": prefill}[kernel]
    pool = inputs.keys, inputs.values, result, inputs.metadata
    function(inputs.query, *pool, case.scaling, case.window, **options)
    return result.cpu()


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.proof
@pytest.mark.parametrize("chunk", [128, 256, 1024])
def test_any_split_size_gives_the_same_result(chunk: int) -> None:
    case = decodes(1, 127, 128, 129, 700, 2300, head_dim=80)
    inputs = case.inputs("triton", HALF)
    assert_near(launch(case, inputs, chunk=chunk), case.oracle(inputs), HALF)


def test_splits_are_joined_whichever_has_the_maximum() -> None:
    """More splits than are read at once, and queries so large that one key dominates, mostly in a late split."""
    case = decodes(3000, 4100, heads=8, spread=8.0)
    inputs = case.inputs("triton", torch.float32)
    scores = (inputs.query.cpu()[1] * inputs.k[1].repeat_interleave(4, 1)).sum(-1)  # [length, heads]
    assert (scores.argmax(0) > 16 * 128).any()
    assert_near(launch(case, inputs, chunk=128), case.oracle(inputs), torch.float32)


@pytest.mark.parametrize("chunk", [0, 64, 192])
def test_a_chunk_that_is_no_multiple_of_128_is_refused(chunk: int) -> None:
    case = decodes(20)
    with pytest.raises(ValueError, match=f"chunk must be a multiple of 128 tokens, got {chunk}"):
        launch(case, case.inputs("triton", torch.float32), chunk=chunk)


def alone(inputs: Inputs, case: Case) -> Iterator[tuple[Case, Inputs]]:
    """Each sequence as a batch of its own, in the same pool."""
    queries = inputs.query.split(case.new)
    for number, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        metadata = replace(
            inputs.metadata,
            cu_seqlens_q=torch.tensor([0, new], dtype=torch.int32, device=inputs.query.device),
            seq_lens=inputs.metadata.seq_lens[number : number + 1],
            page_table=inputs.metadata.page_table[number : number + 1],
            max_seqlen_q=new,
            max_seqlen_k=length,
        )
        yield replace(case, lengths=[length], new=[new]), replace(inputs, query=queries[number], metadata=metadata)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        ("decode", decodes(1, 600, 70, 1500)),
        ("decode", decodes(1, 600, 70, 1500, window=300)),
        ("prefill", prompts(1, 40, 150)),
        ("prefill", Case([90, 40, 150], [3, 40, 70], window=50)),
    ],
)
def test_the_batch_does_not_change_a_bit(kernel: str, case: Case) -> None:
    """Nor do grids for longer sequences than there are, as a captured launch has them."""
    inputs = case.inputs("triton", HALF)
    together = launch(case, inputs, kernel)
    larger = replace(inputs.metadata, max_seqlen_k=inputs.metadata.max_seqlen_k + 2000)
    assert torch.equal(bits(launch(case, replace(inputs, metadata=larger), kernel)), bits(together))
    for (single, inputs_alone), rows in zip(alone(inputs, case), together.split(case.new), strict=True):
        assert torch.equal(bits(launch(single, inputs_alone, kernel)), bits(rows))


@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize("heads", [2, 6, 16])
def test_the_decode_kernel_takes_a_few_new_tokens_a_sequence(heads: int, window: int | None) -> None:
    """As in speculative decoding, or at the end of a prompt: more rows of the same tile."""
    case = Case([8, 5, 140, 70, 1000], [8, 1, 5, 0, 3], heads, window=window)
    inputs = case.inputs("triton", torch.float32)
    assert_near(launch(case, inputs, chunk=128), case.oracle(inputs), torch.float32)


@pytest.mark.parametrize("lengths", [[30, 20, 33, 9], [600, 20, 520, 550]], ids=["one_split", "splits"])
def test_the_decode_kernel_skips_sequences_with_more_new_tokens(lengths: list[int]) -> None:
    case = Case(lengths, [2, 20, 1, 3])
    inputs = case.inputs("triton", torch.float32)
    metadata = replace(inputs.metadata, max_seqlen_q=2)
    found, wanted = (
        launch(case, replace(inputs, metadata=metadata)).split(case.new),
        case.oracle(inputs).split(case.new),
    )
    for number in (0, 2):
        assert_near(found[number], wanted[number], torch.float32)
    assert (found[1] == 7).all()
    assert (found[3] == 7).all()


def test_a_block_writes_no_row_of_the_next() -> None:
    """A group of 3 leaves 2 of 32 rows unused. Had they written, the result would depend on the order of programs."""
    case = prompts(30, heads=6, kv_heads=2)
    inputs = case.inputs("triton", torch.float32)
    first_blocks = replace(inputs, metadata=replace(inputs.metadata, max_seqlen_q=10))
    found = launch(case, first_blocks, "prefill")
    assert_near(found[:10], case.oracle(inputs)[:10], torch.float32)
    assert (found[10:] == 7).all()


def test_many_heads_may_share_one_key_head() -> None:
    for case in (decodes(40, 17, heads=71, kv_heads=1), prompts(40, heads=71, kv_heads=1)):
        inputs = case.inputs("triton", torch.float32)
        assert_near(case.run(ATTEND.load("triton"), inputs), case.oracle(inputs), torch.float32)


@pytest.mark.parametrize("case", [decodes(40, 17), prompts(40, 17)], ids=["decodes", "prompts"])
def test_queries_may_be_a_view(case: Case) -> None:
    inputs = case.inputs("triton", torch.float32)
    wide = torch.cat((inputs.query, inputs.query), -1)[..., : case.head_dim]
    found = case.run(ATTEND.load("triton"), replace(inputs, query=wide))
    assert_near(found, case.oracle(inputs), torch.float32)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_decode_follows_lengths_and_pages() -> None:
    """Captured for up to 2,000 tokens with padding rows, replayed with other lengths and pages in its tensors."""
    short, long = decodes(0, 0, 0), decodes(1900, 1, 600)
    inputs, later = short.inputs("triton", torch.bfloat16), long.inputs("triton", torch.bfloat16)
    pages = torch.zeros_like(later.metadata.page_table)
    metadata = replace(inputs.metadata, page_table=pages, max_seqlen_k=2000)
    query, attend = torch.zeros_like(later.query), ATTEND.load("triton")
    arguments = query, later.keys, later.values, metadata, long.scaling, None
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
    assert_near(result.cpu(), long.oracle(later), torch.bfloat16)
