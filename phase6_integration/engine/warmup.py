"""Warm-up: the steps that compile every kernel variant that serving can launch, before the engine is ready.

A kernel is compiled once for each set of constants. Those of the model and the pool are the same in every step; these
batches go through the others: new tokens of a sequence by power of two, alone and beside a chunk, after a context that
is split, and every kind of sampling.
"""

from collections.abc import Iterator, Sequence

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.kernels.triton.plan import FEW, ROWS
from phase2_prefill_decode.kernels.triton.tuning import LONGEST
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep
from phase6_integration.engine.connect_engine import sampling_kinds

NEW = (1, 2, 4, 8, 16)  # new tokens of a sequence: the decode kernel is compiled for each
CHUNK = 64  # new tokens: too many for the decode kernel
CONTEXT = LONGEST + 64  # tokens: two splits of the decode kernel

DRAWS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.1),
)


def warmup_pages(page_size: int) -> int:
    """The number of pages that the largest of these batches takes."""
    return 2 * -(-CONTEXT // page_size) + len(DRAWS) + len(sampling_kinds())


def attention_batches(cache: PagedCache, max_tokens: int) -> Iterator[Batch]:
    """Yield batches for the kernels of attention, one after the other; each has pages in `cache` until the next is
    taken. No sequence is longer than `max_tokens`. A CPU has one kernel for all of them."""
    length = min(CONTEXT, max_tokens)
    for new in NEW:
        for beside in ((), (CHUNK,)):
            yield from _in_pages(cache, [(min(count, length), length, DRAWS[0]) for count in (new, *beside)])


def sampling_batches(cache: PagedCache) -> Iterator[Batch]:
    """Yield batches of decodes for the kernels of sampling, in the same way."""
    kinds = (*DRAWS, *sampling_kinds())
    for some in (*((params,) for params in kinds), kinds):
        yield from _in_pages(cache, [(1, 1, params) for params in some])


def long_step(state: DeviceState, sequences: int, config: ModelConfig, context: int) -> PackedStep:
    """The step in which the decode kernel has most results of splits: as many new tokens of a sequence as it takes, all
    sequences of `context` tokens. Memory is allocated for these sizes, and the device finds no keys."""
    new = max(FEW, ROWS * config.num_key_value_heads // config.num_attention_heads)
    padding = PackedStep.empty().padded(sequences, state.scratch_row, state.scratch_row * state.width, context, 0)
    return padding._replace(sizes=((new, context),) * sequences, max_seqlen_q=new)


def _in_pages(cache: PagedCache, sequences: Sequence[tuple[int, int, SamplingParams]]) -> Iterator[Batch]:
    """Yield a batch of sequences, given as (new tokens, all tokens, parameters). The new ones are the last."""
    slices = []
    for number, (new, length, params) in enumerate(sequences):
        request = Request(f"warm-up {number}", (0,) * length, params)
        cache.attach(request)
        cache.grow(request, length)
        slices.append(Slice(request, length - new, new))
    yield Batch(tuple(slices))
    for request, *_ in slices:
        cache.release(request)
