"""The process of another rank: it loads its part of the model, then computes what rank 0 commands, until that ends."""

import json
import logging
import os
import signal
import sys
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from phase0_request.support.entry import die_with
from phase0_request.support.memory import free_bytes
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode import connect
from phase2_prefill_decode.backend import Record
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.parallel.group import Group
from phase2_prefill_decode.extras.parallel.layers import ParallelDecoder
from phase2_prefill_decode.extras.parallel.leader import DTYPES, FREE, HIDDEN, LOGITS, POOL, RECORD, REPLAY, received
from phase2_prefill_decode.extras.parallel.ranks import LOST, LostError, receive
from phase2_prefill_decode.extras.parallel.shard import Shard, load_part
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.step.graphs import cuda_record

log = logging.getLogger(__name__)


class Worker:
    """A rank's decoder, its KV pool, and the hidden states of the last step."""

    def __init__(self, decoder: ParallelDecoder, end: Connection) -> None:
        self.decoder = decoder
        self.end = end
        self.layers = decoder.layers
        self.pool: KVPool | None = None
        self.recorded: list[Callable[[], Any]] = []
        self.record: Record | None = None

    # region follow
    def follow(self) -> bool:
        """Do what rank 0 commands next. False once it has ended."""
        message = receive(self.end)
        if message is not None:
            self._run(*array("q", message))
        return message is not None

    def _run(self, command: int, *numbers: int) -> None:
        decoder = self.decoder
        if command == POOL:
            pages, page_size, dtype = numbers
            self.pool = None  # first: there may be no memory for two
            self.pool = KVPool(decoder.config.kv_layout(page_size, DTYPES[dtype]), pages, decoder.device)
            self.end.send_bytes(json.dumps({"pages": pages}).encode())
        if command == FREE:
            self.pool, self.record = None, None
            self.recorded.clear()
            self.end.send_bytes(json.dumps(free_bytes(decoder.device)).encode())
        if command == HIDDEN:
            layers, *sizes = numbers
            assert self.pool is not None
            step = received(sizes, decoder.device, decoder.group.broadcast)
            decoder.layers = self.layers[:layers]  # a profile of a CPU takes one
            self.hidden = decoder.hidden(step, self.pool.layers)
        if command == LOGITS:
            start, count = numbers
            decoder.lm_head(self.hidden[start : start + count])
        if command == RECORD:
            self.record = record = self.record or cuda_record()
            self.recorded.append(record(self._step))
        if command == REPLAY:
            (number,) = numbers
            self.recorded[number]()

    def _step(self) -> Any:
        """One step that is recorded: its layers, then its logits."""
        self.follow()
        self.follow()

    # endregion


def loaded(settings: dict[str, Any], end: Connection) -> Worker:
    """Load the part of a rank."""
    torch.set_num_threads(settings["threads"])
    rank, directory = settings["rank"], settings["directory"]
    device = torch.device("cpu") if settings["device"] == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # which kernels are compiled and launched on
    shard = Shard(connect.config_of(directory, settings["dtype"]), rank, settings["size"])
    transform = None if settings["transform"] is None else Quantization(**settings["transform"])
    weights = load_part(directory, shard, device, transform)
    backend = backend_for(device)
    decoder = ParallelDecoder(shard, weights, Group(rank, shard.size), backend)
    receive(end)  # rank 0 has compiled the kernels
    backend.compile(decoder, settings["kv_cache_dtype"], False)
    return Worker(decoder, end)


def follow(end: Connection) -> None:
    """Load, meet the other ranks, and do what rank 0 commands until it has ended."""
    settings = json.loads(receive(end) or b"{}")
    worker = loaded(settings, end)
    end.send_bytes(json.dumps({"loaded": True}).encode())
    worker.decoder.group.connect(settings["file"], settings["timeout"], worker.decoder.device)
    end.send_bytes(json.dumps({"connected": True}).encode())
    with torch.inference_mode():
        while worker.follow():
            pass


def main() -> int:
    """Run the process. Signals are for the process that started it: this one ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    end, code = Connection(descriptor), 0
    if die_with(parent):
        try:
            follow(end)
        except LostError:
            code = LOST
        except Exception as error:
            log.exception("rank failed")
            end.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            code = 1
    os._exit(code)  # does not wait for threads of libraries


if __name__ == "__main__":
    main()
