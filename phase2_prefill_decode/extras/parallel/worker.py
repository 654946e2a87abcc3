"""The process of another rank: it loads its part of the model, then executes rank 0's calls until rank 0 ends."""

import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from copy import copy
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from phase0_request.support.entry import die_with
from phase0_request.support.memory import free_bytes
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.parallel.group import Group
from phase2_prefill_decode.extras.parallel.layers import ParallelDecoder
from phase2_prefill_decode.extras.parallel.ranks import LOST, LostError, receive
from phase2_prefill_decode.extras.parallel.shard import Shard, load_part
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner

log = logging.getLogger(__name__)


class Worker:
    """One rank's part of a model, and its runner. Rank 0 calls the methods."""

    runner: ModelRunner | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def load(
        self, directory: Path, config: ModelConfig, size: int, device: str, transform: Quantization | None, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        place = torch.device(device) if device == "cpu" else torch.device(device, self.rank)
        if place.type == "cuda":
            torch.cuda.set_device(place)  # which kernels are compiled and launched on
        shard = Shard(config, self.rank, size)
        weights = load_part(directory, shard, place, transform)
        self.decoder = ParallelDecoder(shard, weights, Group(self.rank, size), backend_for(place))

    def compile(self, kv_cache_dtype: str | None) -> None:
        self.decoder.backend.compile(self.decoder, kv_cache_dtype, False)

    def connect(self, file: str, timeout: float) -> None:
        self.decoder.group.connect(file, timeout, self.decoder.device)

    # region worker
    def build(self, config: ModelConfig, layout: KVLayout, pages: int, shape: tuple[int, int]) -> None:
        """Make a runner. Its layers have rank 0's configuration; profiling a CPU takes the first of them."""
        self.runner = None  # first: there may be no memory for two pools
        decoder, device = copy(self.decoder), self.decoder.device
        decoder.config, decoder.layers = config, decoder.layers[: config.num_hidden_layers]
        pool, cache = KVPool(layout, pages, device), PagedCache(pages, layout.page_size)
        sampler = Sampler(decoder.config.vocab_size, draw=drawn_on_rank_0)
        self.runner = ModelRunner(decoder, pool, cache, sampler, state_of(shape, device))

    def forward(self, step: PackedStep, shape: tuple[int, int]) -> None:
        """Run a step. `shape` is the size of rank 0's page tables, which may have grown."""
        assert self.runner is not None
        old = self.runner.state.page_table
        if old.shape != shape:
            self.runner.state = state_of(shape, old.device)
            self.runner.state.page_table[: len(old), : old.shape[1]] = old
        self.hidden = self.runner.forward(step).hidden

    def logits(self, first: int, rows: int) -> None:
        """Compute the logits of more rows of that step."""
        first -= self.hidden.storage_offset() // self.hidden.shape[1]
        self.decoder.lm_head(self.hidden[first : first + rows])

    def record(self, sizes: Sequence[int], context: int) -> None:
        assert self.runner is not None
        self.runner.record(sizes, context)

    def free_bytes(self) -> int | None:
        self.runner = None
        return free_bytes(self.decoder.device)

    # endregion


def state_of(shape: tuple[int, int], device: torch.device) -> DeviceState:
    """Page tables of the same size as rank 0's."""
    rows, pages = shape
    return DeviceState(device, rows - 1, pages)


def drawn_on_rank_0(logits: Tensor, inputs: SamplingInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Takes the place of a draw. The tokens come with the next step's embedding."""
    return logits.new_zeros(len(logits), dtype=torch.int64), logits.new_zeros(len(logits), dtype=torch.float32)


def follow(end: Connection, rank: int) -> None:
    """Execute rank 0's calls until it has ended."""
    worker = Worker(rank)
    with torch.inference_mode():
        while (message := receive(end)) is not None:
            replies, method, values = pickle.loads(message)
            result = getattr(worker, method)(*values)
            if replies:
                end.send_bytes(json.dumps(result).encode())


def main() -> int:
    """Run the process. Signals are handled by the process that started it, and this one ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, parent, rank = map(int, sys.argv[1:])
    end, code = Connection(descriptor), 0
    if die_with(parent):
        try:
            follow(end, rank)
        except LostError:
            code = LOST
        except Exception as error:
            log.exception("rank failed")
            end.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            code = 1
    os._exit(code)  # does not wait for threads of libraries


if __name__ == "__main__":
    main()
