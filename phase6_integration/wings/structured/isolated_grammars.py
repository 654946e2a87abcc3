"""IsolatedGrammars: constraints in other processes, one for each tenant: a server trusts no grammar of a client.

The engine waits PATIENCE for a mask at most. A request without its mask draws no token in the step, and takes part in
no step until the mask is there. A process that dies fails one request: the one that it could not answer.
"""

import selectors
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from itertools import count

import numpy as np
import torch

from phase0_request import entry
from phase0_request.batch import WaitHandle
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.sampling.constraints import (
    Constraint,
    Constraints,
    Filled,
    Follower,
    Rows,
    fill_masks,
    words,
)
from phase2_prefill_decode.sampling.sampler import Sampler
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.engine_process import Made, bundled_engine
from phase6_integration.wings.structured import grammar_process
from phase6_integration.wings.structured.isolated_process import IsolatedConstraint, IsolatedProcess

TOKENS_PER_SECOND = 1000  # that a tenant is charged with for the processor time of its grammars
PROCESSES = 8  # at a time; with more tenants than that, some share one
# The arenas of malloc, 64 MB of addresses for each thread, would count as memory that a process has taken.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class IsolatedGrammars(Constraints):
    """Makes the constraints of requests in processes, which it starts when the first grammar comes, and does the work
    for grammars beside the steps."""

    def __init__(self, vocab_size: int, directory: str, eos_ids: Collection[int]) -> None:
        super().__init__(vocab_size, None)
        self._arguments = [directory, str(vocab_size), *map(str, sorted(eos_ids))]
        self._parent: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._selector = selectors.DefaultSelector()
        self._processes: list[IsolatedProcess] = []  # the latest used last
        self._keys = count()
        self._failed: list[IsolatedConstraint] = []
        self._seconds = defaultdict[str, float](float)  # that grammars have taken, by tenant, not charged yet
        self.prepare = self.of

    @classmethod
    def install(cls, sampler: Sampler, options: EngineOptions) -> "IsolatedGrammars":
        """Have a sampler follow grammars in processes from now on."""
        directory = directory_of(options.tokenizer or options.model, options.revision, options.download_dir)
        made = cls(sampler.vocab_size, str(directory), sampler.eos_ids)
        sampler.constraints, made.prepare = made, sampler.constraint_of
        return made

    def of(self, request: Request) -> Follower:
        """A request's constraint. Its grammar is compiled from now on."""
        if request.params.grammar is None:
            return super().of(request)
        return IsolatedConstraint(next(self._keys), request, self._process_of(request.tenant))

    def start(self, rows: Rows) -> Callable[[], Filled]:
        """Have the masks made. Mostly they are on their way since the token before was taken."""
        for _, constraint, index in rows:
            if isinstance(constraint, IsolatedConstraint):
                constraint.ask(index)
        return partial(self.fill, rows)

    def fill(self, rows: Rows) -> Filled:
        """The masks that are ready, and the rows without one, which have no bits. Those of lists are filled here."""
        started = time.monotonic()
        self.start(rows)
        bits, late = np.zeros((len(rows), words(self.vocab_size)), np.uint32), dict[int, WaitHandle]()
        for number, (row, constraint, index) in enumerate(rows):
            if isinstance(constraint, Constraint):
                bits[number] = fill_masks([(constraint, index)], self.vocab_size)[0]
            elif isinstance(constraint, IsolatedConstraint):
                mask = constraint.mask(index, started)
                if mask is not None:
                    bits[number] = mask
                elif constraint.error is None:
                    late[row] = constraint
        return Filled(torch.from_numpy(bits.view(np.int32)), late)

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has come."""
        return self._selector.fileno()

    def receive(self, scheduler: Scheduler, now: float) -> None:
        """Read the answers that have come, end the requests whose grammars have failed, and charge tenants."""
        self.poll(0)
        failed, self._failed = self._failed, []
        for constraint in failed:
            if (request := constraint.request()) is not None:
                scheduler.finish(request, FinishReason.ERROR, now, constraint.error)
        seconds, self._seconds = self._seconds, defaultdict(float)
        for tenant, taken in seconds.items():
            scheduler.charge(tenant, taken * TOKENS_PER_SECOND)

    def poll(self, timeout: float) -> None:
        """Send what waits and read answers; wait for these so many seconds if there is none."""
        for process in self._processes:
            process.send()
        for key, events in self._selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                key.data.push()
            if events & selectors.EVENT_READ:
                key.data.read()

    def failed(self, constraint: IsolatedConstraint) -> None:
        self._failed.append(constraint)

    def spent(self, tenant: str, seconds: float) -> None:
        self._seconds[tenant] += seconds

    # Processes.

    def _process_of(self, tenant: str) -> IsolatedProcess:
        """The process of a tenant. With too many of them, the one that has been idle for longest is ended for it, or
        one is shared."""
        processes = self._processes
        process = next((process for process in processes if process.tenant == tenant), None)
        if process is None and len(processes) >= PROCESSES:
            idle = next((process for process in processes if not len(process)), None)
            if idle is None:
                return min(processes, key=len)
            idle.close()
            processes.remove(idle)
        if process is None:
            process = IsolatedProcess(self, self._selector, tenant)
        else:
            processes.remove(process)
        processes.append(process)
        return process

    def connect(self) -> socket.socket:
        """Have a child forked, and connect to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._connection(), [b"\0"], [theirs.fileno()])
            except OSError:  # the parent has ended: the next one is started for the next child
                self._stop()
        return ours

    def _connection(self) -> socket.socket:
        if self._parent is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", grammar_process.__name__, str(theirs.fileno())]
                process = subprocess.Popen(
                    [*command, *self._arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C reaches the server only
                    env={**entry.environment(), **ENVIRONMENT},
                )
            self._parent = process, ours
        return self._parent[1]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._stop()

    def _stop(self) -> None:
        """End the parent of the processes, which forks no more."""
        if self._parent is not None:
            process, connection = self._parent
            self._parent = None
            connection.close()
            process.kill()
            process.wait()


def isolating_engine(options: EngineOptions) -> Made:
    """The bundled engine, with the grammars of clients in processes of their own: a factory for AsyncEngine."""
    return bundled_engine(options, IsolatedGrammars.install)
