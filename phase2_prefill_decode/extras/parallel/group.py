"""Group: the collectives of tensor parallel, by torch.distributed: gloo between CPUs, NCCL between GPUs.

All ranks call the same collectives in the same order. gloo uses the loopback interface only. It never closes the socket
at which a rank awaits the others, and ends the process if too many connect. So once all ranks are connected, the kernel
drops everything that arrives there.
"""

import ctypes
import logging
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phase2_prefill_decode.extras.parallel.ranks import LostError

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
SO_ATTACH_FILTER = 26  # of Linux
KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)  # a packet filter: return 0 bytes
c10d: Any = dist  # its types do not know what of it a backend has


class Group:
    """The ranks of one model. They connect once all have loaded their part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def connect(self, file: str, seconds: float, device: torch.device) -> None:
        """Meet the other ranks, which know the same file. A collective fails after this many seconds without them."""
        listening = _listening()
        if device.type == "cuda":
            kind = c10d.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = c10d.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=LOOPBACK)]
        listening = _listening() - listening
        options._timeout = timedelta(seconds=seconds)
        try:
            self._group = kind(c10d.FileStore(file, self.size), self.rank, self.size, options)
        except RuntimeError as error:
            raise LostError(str(error)) from error
        self.all_reduce(torch.zeros(1, device=device))  # NCCL connects, by the file, in the first one
        program = struct.pack("HP", 1, ctypes.addressof(KEEP_NOTHING))
        for descriptor, number in listening:  # that sum has had a part of every rank: all are connected
            try:
                if os.fstat(descriptor).st_ino == number:  # no thread has closed it and opened another
                    with socket.socket(fileno=os.dup(descriptor)) as listener:
                        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            except OSError as error:
                log.warning("other users of this machine can connect to rank %d: %s", self.rank, error)
        self.all_reduce(torch.zeros(1, device=device))  # no rank goes on before all have done so

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum over all ranks, in place: each has the same bits."""
        self._wait(self._group.allreduce([part]))
        return part

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, in place."""
        self._wait(self._group.broadcast(numbers, 0))
        return numbers

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, on rank 0. The others get none."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if parts else [], [part], options))
        return parts

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective. On a GPU the stream waits, not the host."""
        try:
            work.wait()
        except RuntimeError as error:
            raise LostError(str(error)) from error


def _listening() -> set[tuple[int, int]]:
    """The listening sockets of this process: their descriptors, and their numbers in the system. Outside Linux none
    are known."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd") if sys.platform == "linux" else ()):
        with suppress(OSError):  # another thread has closed it
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add((descriptor, status.st_ino))
    return found
