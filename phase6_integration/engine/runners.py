"""Makes an engine's runner from a model, its sampler and a pool, with the steps that a GPU records before it serves."""

from collections.abc import Sequence
from typing import NamedTuple

from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KVLayout
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.graphs import cuda_record
from phase2_prefill_decode.step.runner import ModelRunner
from phase6_integration.engine.connect_engine import record_pieces, touch


class Computing(NamedTuple):
    """A model with its sampler, and the layout of its keys and values."""

    model: Model
    sampler: Sampler
    layout: KVLayout


class RecordedSteps(NamedTuple):
    """The steps to record. All others are launched kernel by kernel."""

    sizes: Sequence[int] = ()  # requests of a decode step
    counts: Sequence[int] = ()  # tokens of a step in pieces


def make_runner(
    computing: Computing, cache: PagedCache, context: int, recorded: RecordedSteps, *, ahead: bool = False
) -> ModelRunner:
    """A runner with a pool for this cache. No sequence is longer than `context`."""
    model, sampler, layout = computing
    model.decoder.rope(context)  # the tables are built now, not in the middle of a step
    rows = 2 * max(recorded.sizes, default=0)  # as many may have ended in flight as run
    size = (rows, -(-context // cache.page_size)) if rows else ()
    runner = runner_for(model.decoder, cache, sampler, layout.dtype, size, ahead=ahead)
    touch(runner.pool)
    if not recorded.sizes:
        return runner
    record = cuda_record()
    record_pieces(runner, recorded.counts, context, record)
    runner.record(recorded.sizes, context, record)
    return runner
