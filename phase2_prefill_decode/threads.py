"""The number of CPU threads for a model.

Threads of an OpenMP library spin while they wait for each other, several times a layer. That is fastest on cores of
their own. Where another program takes a core, the thread there is descheduled in the middle of its part and the others
spin meanwhile: a step takes many times as long. To sleep instead costs as much on an idle machine, and has to be set
before torch is loaded. So the decoder uses as many threads as there are free cores, and looks again while it runs. A
small model, which gains little from a second thread, has one from the start.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from phase2_prefill_decode.loading.config import ModelConfig

SMALL = 32 << 20  # bytes of weights
PERIOD = 0.2  # seconds between two looks
STALE = 2.0  # seconds; a look that is older is of no use
TAKEN = 0.3  # of a core, by other programs, from which on it is not free
STAT = Path("/proc/stat")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(config: ModelConfig) -> int:
    return 1 if config.bytes <= SMALL else cores()


def set_threads(threads: int) -> None:
    """Set torch's number of threads: the most that a step uses from now on."""
    import torch

    torch.set_num_threads(threads)
    FREE_CORES.limit = threads


class FreeCores:
    """Keeps torch's number of threads at the number of free cores, and never above the number it was set to before."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, asleep: bool = False) -> None:
        """`asleep`: threads sleep while they wait, and lose little by a neighbour. Nothing is changed then."""
        self._asleep = asleep
        self._clock = clock
        self._last = self._times()
        self.limit = self._set = 0

    # region follow
    def follow(self) -> None:
        """Before a step: if PERIOD has passed, look how busy other programs kept the cores meanwhile."""
        if self._asleep or self._clock() < self._last[0] + PERIOD:
            return
        import torch

        before, self._last = self._last, self._times()
        if self._last[0] > before[0] + STALE:  # no step for a while: what was busy then says nothing of now
            return
        passed, busy, own = (end - start for start, end in zip(before, self._last, strict=True))
        threads = torch.get_num_threads()
        if threads != self._set:  # set by the program since the last step
            self.limit = threads
        free = cores() - (busy - own) / passed
        self._set = max(1, min(self.limit, int(free + TAKEN)))
        if self._set != threads:
            torch.set_num_threads(self._set)

    # endregion

    def _times(self) -> tuple[float, float, float]:
        """The time, and the seconds that the cores were busy with anything, and with this process. 0 if not known."""
        return self._clock(), busy_seconds(), time.process_time()


def busy_seconds() -> float:
    """The seconds that the cores of this process were busy since the system started; 0 if it does not tell."""
    try:
        lines = STAT.read_text().splitlines()
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rate = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
    ticks = 0
    for line in lines:
        name, *columns = line.split()
        if name in mine:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, columns)
            ticks += user + nice + system + irq + softirq + steal
    return ticks / rate


# One of a process, as torch has one number of threads.
FREE_CORES = FreeCores(asleep=os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive")
