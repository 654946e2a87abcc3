"""Group: the collectives of tensor parallel, by torch.distributed: gloo between CPUs, NCCL between GPUs.

All ranks call the same ones in the same order. Those of gloo go through the loopback interface only.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phase2_prefill_decode.parallel.ranks import LostError

LOOPBACK = "127.0.0.1"
c10d: Any = dist  # its types do not know what of it a backend has


class Group:
    """The ranks of one model. They are connected once all have loaded their part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def connect(self, file: str, seconds: float, device: torch.device) -> None:
        """Meet the other ranks, which know the same file. A collective fails after some seconds without them."""
        if device.type == "cuda":
            kind = c10d.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = c10d.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=seconds)
        try:
            self._group = kind(c10d.FileStore(file, self.size), self.rank, self.size, options)
        except RuntimeError as error:
            raise LostError(str(error)) from error
        self.all_reduce(torch.zeros(1, device=device))  # NCCL connects, by the file, in the first one

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
        """Wait for a collective; on a GPU its stream does, and not the host."""
        try:
            work.wait()
        except RuntimeError as error:
            raise LostError(str(error)) from error
