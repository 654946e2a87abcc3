"""Compile the kernels of a model before it is used, on all cores, and say how far that is.

numba compiles a kernel at its first call, on one core and without a word. All kernels of a model take half a minute on
a fast machine and two on a slow one. numba has one lock for all that it compiles, so here each core has a process of
its own, and the results come through the cache. What the cache holds already is loaded, which takes a moment.

How far it is: INFO records of this module's logger, and a bar on a terminal for callers that want one.
"""

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from threading import Thread
from typing import IO, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request import safe_path
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.cpu.attention import attend
from phase2_prefill_decode.kernels.cpu.cache import NotCachedError, is_writable, only_cached
from phase2_prefill_decode.kernels.cpu.draw import draw
from phase2_prefill_decode.kernels.cpu.forward import forward_body
from phase2_prefill_decode.kernels.cpu.pointwise import add_norm, rotate_store, swiglu
from phase2_prefill_decode.sampling.inputs import SamplingInputs
from phase2_prefill_decode.threads import cores

log = logging.getLogger(__name__)
PROCESSES = 3  # at most: attention alone takes a third of all
BEAT = 1.0  # seconds between two looks at the clock of the bar


def _attention(dtype: torch.dtype) -> Tensor:
    one, page = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, 16, 16, dtype=dtype)
    metadata = AttentionMetadata(torch.arange(2, dtype=torch.int32), one, torch.zeros_like(one)[None], 1, 1)
    return attend(page[0, :, :1], page, page, metadata, 1.0)


def _rotation(dtype: torch.dtype) -> Tensor:
    zero, page, angles = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 16, 16, dtype=dtype), torch.zeros(1, 8)
    return rotate_store(torch.zeros(1, 48, dtype=dtype), angles, angles, zero, zero, page, page, None, 1e-6)


def _sampling(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    number, integer, key = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return draw(torch.zeros(1, 16, dtype=dtype), SamplingInputs(number, integer, number, number, key, key), 16)


# What compiles each, on tensors as small as can be: kernels are compiled for a dtype, not for sizes. The longest first.
KERNELS: dict[str, Callable[[torch.dtype], object]] = {
    "attention": _attention,
    "forward": lambda _: forward_body(),
    "sampling": _sampling,
    "rotation": _rotation,
    "norm": lambda dtype: add_norm(torch.zeros(1, 16, dtype=dtype), None, torch.zeros(16, dtype=dtype), 1e-6),
    "swiglu": lambda dtype: swiglu(torch.zeros(1, 16, dtype=dtype)),
}


class Kernel(NamedTuple):
    """One of KERNELS, in a dtype."""

    name: str
    dtype: str

    def make(self) -> None:
        """Compile it in this process, or load it from the cache."""
        KERNELS[self.name](getattr(torch, self.dtype))

    def is_cached(self) -> bool:
        """Whether it is in the cache; it is loaded if so."""
        with only_cached():
            try:
                self.make()
            except NotCachedError:
                return False
        return True


def kernels_of(dtype: torch.dtype, forward: bool) -> list[Kernel]:
    """The kernels of a model in this dtype; `forward`: it is small, and has the one call for a decode. Logits that are
    edited or masked are float32."""
    of_model = str(dtype).removeprefix("torch.")
    names = [name for name in KERNELS if forward or name != "forward"]
    edited = [] if dtype == torch.float32 else [Kernel("sampling", "float32")]
    return sorted([*(Kernel(name, of_model) for name in names), *edited], key=lambda kernel: names.index(kernel.name))


def compile_kernels(kernels: Sequence[Kernel], *, progress: bool = False) -> None:
    """Load these kernels, after those that the cache does not hold have been compiled. `progress` shows a bar."""
    kept = is_writable()
    missing = [kernel for kernel in kernels if not (kept and kernel.is_cached())]
    if not missing:
        return

    def compiling() -> Iterator[tuple[int, str]]:
        if kept and cores() > 1:
            yield from _in_processes(missing)
        left = [kernel for kernel in missing if not (kept and kernel.is_cached())]
        for number, name in _here(left):
            yield len(missing) - len(left) + number, name

    words = "compiling kernels for this CPU, once"
    with tqdm(total=len(missing), desc=words, leave=False, disable=None if progress else True) as bar:
        said = -1
        for done, now in compiling():
            bar.update(done - bar.n)
            bar.set_postfix_str(now)
            if done != said and now:
                log.info("%s, %d of %d done, now %s", words, done, len(missing), now)
            said = done
    for kernel in missing:
        kernel.make()


def _here(kernels: Sequence[Kernel]) -> Iterator[tuple[int, str]]:
    """Compile in this process. Yields how many are done, and the name of the next."""
    for number, kernel in enumerate(kernels):
        yield number, kernel.name
        kernel.make()


def _in_processes(kernels: Sequence[Kernel]) -> Iterator[tuple[int, str]]:
    """Compile in other processes. Yields how many are done, and the names of those under way, at each change and each
    BEAT. A kernel on which a process fails is left to this one."""
    waiting, under_way, done = deque(kernels), dict[subprocess.Popen[bytes], Kernel](), 0

    def give(worker: subprocess.Popen[bytes]) -> None:
        under_way[worker] = kernel = waiting.popleft()
        with suppress(BrokenPipeError):  # it has failed, and its output ends
            _pipe(worker.stdin).write(f"{kernel.name} {kernel.dtype}\n".encode())

    with ExitStack() as ends, DefaultSelector() as selector:
        for _ in range(min(len(kernels), cores(), PROCESSES)):
            worker = ends.enter_context(_start())
            ends.callback(worker.kill)
            selector.register(_pipe(worker.stdout), EVENT_READ, worker)
            give(worker)
        while under_way:
            yield done, ", ".join(kernel.name for kernel in under_way.values())
            for key, _ in selector.select(BEAT):
                del under_way[key.data]
                alive = bool(key.data.stdout.readline())
                done += alive
                if alive and waiting:
                    give(key.data)
                else:
                    selector.unregister(key.fileobj)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "phase2_prefill_decode.kernels.cpu.compilation"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=safe_path.environment(),
    )


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def main() -> None:
    """Run such a process: compile what the standard input names, and write a line after each. When the input ends, as
    it does when the other process ends, this one does at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    named: SimpleQueue[Kernel] = SimpleQueue()

    def work() -> None:
        try:
            while True:
                named.get().make()
                print("done", flush=True)
        finally:
            os._exit(1)

    Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        named.put(Kernel(*line.split()))
    os._exit(0)


if __name__ == "__main__":
    main()
