"""DecodeGraphs: decode steps that are recorded once and launched as a whole.

A decode step launches some ten kernels a layer. For a small batch the host takes longer to launch them than the device
to run them. A CUDA graph is a recorded sequence of launches, and one call launches all of it. It keeps the addresses of
its tensors and the size of its batch. So there is a graph for each of a few sizes: a step is padded to the next one,
and its array is copied to where the graph reads it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep, join, split
from phase2_prefill_decode.transfer import pinned


class Computed(NamedTuple):
    """The results of a step, on the device. A graph keeps them all."""

    step: StepTensors
    logits: Tensor  # [draws, vocab]
    hidden: Tensor  # [rows, hidden_size]: after those of the draws, the rows that processors want
    draws: tuple[Tensor, Tensor] | None = None  # tokens and peaks, if nothing is asked for but a draw


Replay = Callable[[], Computed]
Record = Callable[[Callable[[], Any]], Callable[[], Any]]  # runs a computation, and returns what runs it again
Compute = Callable[[PackedStep, Sequence[Tensor]], Computed]  # takes a step and its arrays on the device


class Graph(NamedTuple):
    """A recorded step of decodes."""

    array: Tensor  # [numbers] int32, its input on the device
    run: Replay


class DecodeGraphs:
    """The recorded steps of one engine, by size. All share the memory of their intermediate results, because only one
    runs at a time."""

    def __init__(self, state: DeviceState, page_size: int, context: int) -> None:
        """`context` is the largest number of tokens in a sequence."""
        if not state.fixed:
            raise ValueError("a recorded step needs a device state of fixed size: give it rows and pages")
        self.state = state
        self.context = min(context, state.width * page_size)
        self._graphs: dict[int, Graph] = {}

    # region record
    def record(self, compute: Compute, sizes: Sequence[int], record: Record) -> None:
        """Record a step of each size, the largest first: its memory is enough for the others."""
        for size in tqdm(sorted(sizes, reverse=True), "recording graphs", leave=False, disable=None):
            step = self.pad(PackedStep.empty(), size)
            arrays = step.arrays
            array = join(arrays).to(self.state.newest.device)
            self._graphs[size] = Graph(array, record(partial(compute, step, split(array, arrays))))

    # endregion

    def replay(self, step: PackedStep) -> Computed:
        """Run a step that was padded for a graph."""
        graph = self._graphs[step.graph_size]
        graph.array.copy_(pinned(join(step.arrays), graph.array.device), non_blocking=True)
        return graph.run()

    # region exercise 7.4
    def size_for(self, step: PackedStep) -> int:
        """The size of the smallest graph that holds a step. 0 if the step is not all decodes, or if it is too large, or
        if too many entries of its page tables have changed: it is launched kernel by kernel."""
        slices = len(step.table_rows)
        if step.max_seqlen_q > 1 or not step.all_logits or step.max_seqlen_k > self.context:
            return 0
        fits = (size for size in self._graphs if slices <= size and len(step.changed) <= self.state.changes * size)
        return min(fits, default=0)

    # endregion

    def pad(self, step: PackedStep, size: int) -> PackedStep:
        """The step, padded to the size of a graph."""
        scratch, changes = self.state.scratch_row, self.state.changes * size
        return step.padded(size, scratch, scratch * self.state.width, self.context, changes)


def batch_sizes(most: int) -> list[int]:
    """The sizes of graphs up to `most` requests: few enough to record, close enough to waste little by padding."""
    return sorted({*(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most, 16)) if size < most), most})


def cuda_record() -> Record:
    """Records CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Replay) -> Replay:
        run()  # compiles kernels and allocates workspaces, which must not happen while recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()

        def replay() -> Computed:
            graph.replay()
            return result

        return replay

    return record
