"""IsolatedGrammars: constraints in other processes, one for each tenant: a server trusts no grammar of a client.

The engine waits PATIENCE for a mask at most. A request without its mask draws no token in the step, and takes part in
no step until the mask is there. Processes that die fail one request: the one that two of them could not answer.
"""

import selectors
import time
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phase0_request.core import CoreObserver, EngineCore
from phase0_request.queue import WaitHandle
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.extras.grammar.constraints import (
    Constraint,
    Constraints,
    Filled,
    Follower,
    Rows,
    fill_masks,
    words,
)
from phase2_prefill_decode.extras.grammar.masks import masks_of
from phase2_prefill_decode.sampling.sampler import Sampler
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.loop_hooks import LoopHooks, Send
from phase6_integration.engine.options import EngineOptions
from phase6_integration.extras.structured.grammar_server import GrammarServer
from phase6_integration.extras.structured.isolated_process import IsolatedConstraint, IsolatedProcess

TOKENS_PER_SECOND = 1000  # that a tenant is charged with for the processor time of its grammars
PROCESSES = 8  # at a time; with more tenants than that, some share one


class IsolatedGrammars(Constraints, CoreObserver):
    """Makes the constraints of requests in processes, which it starts when the first grammar comes, and does the work
    for grammars beside the steps."""

    def __init__(self, vocab_size: int, directory: str, eos_ids: Collection[int]) -> None:
        super().__init__(vocab_size, None)
        self.server = GrammarServer(directory, vocab_size, eos_ids)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[str, IsolatedProcess] = {}  # by the tenant that each was started for
        self._keys = count()
        self.prepare = self.of

    @classmethod
    def install(cls, sampler: Sampler, options: EngineOptions) -> "IsolatedGrammars":
        """Have a sampler follow grammars in processes from now on."""
        directory = directory_of(options.tokenizer or options.model, options.revision, options.download_dir)
        masks = masks_of(sampler)
        made = cls(sampler.vocab_size, str(directory), masks.eos_ids)
        masks.constraints, made.prepare = made, masks.constraint_of
        return made

    def of(self, request: Request) -> Follower:
        """A request's constraint. Its grammar is compiled from now on."""
        if request.params.grammar is None:
            return super().of(request)
        return IsolatedConstraint(next(self._keys), request, self._process_of(request.tenant))

    def submitted(self, request: Request) -> None:
        """Have its grammar compiled while it waits and while its prompt is computed."""
        if request.params.grammar is not None:
            self.prepare(request)

    def _process_of(self, tenant: str) -> IsolatedProcess:
        """The process of a tenant. With too many of them, those without requests are ended, or one is shared."""
        if tenant not in self._processes and len(self._processes) >= PROCESSES:
            for idle in [name for name, process in self._processes.items() if not len(process)]:
                self._processes.pop(idle).close()
        if tenant not in self._processes:
            if len(self._processes) >= PROCESSES:
                return min(self._processes.values(), key=len)
            self._processes[tenant] = IsolatedProcess(self.server, self._selector, self.poll)
        return self._processes[tenant]

    def start(self, rows: Rows) -> Callable[[], Filled]:
        """Have the masks made. Mostly they are on their way since the token before was taken."""
        for _, constraint, index, draft in rows:
            if isinstance(constraint, IsolatedConstraint):
                constraint.ask(index)
                constraint.verify(draft)
        self.poll(0)
        return partial(self.fill, rows)

    def fill(self, rows: Rows) -> Filled:
        """The masks that are ready, and the rows without one, which have no bits. Those of lists are filled here."""
        started = time.monotonic()
        self.start(rows)
        count, late = sum(1 + len(draft) for *_, draft in rows), dict[int, WaitHandle]()
        bits, first = np.zeros((count, words(self.vocab_size)), np.uint32), 0
        for row, constraint, index, draft in rows:
            masks: NDArray[np.uint32] | None = None
            if isinstance(constraint, Constraint):
                masks = fill_masks(constraint.places(index, draft), self.vocab_size)
            elif isinstance(constraint, IsolatedConstraint):
                masks = constraint.masks(index, draft, started)
                if masks is None and constraint.error is None:
                    late[row] = constraint
            if masks is not None:
                bits[first : first + len(masks)] = masks
            first += 1 + len(draft)
        return Filled(torch.from_numpy(bits.view(np.int32)), late)

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has come."""
        return self._selector.fileno()

    def receive(self, scheduler: Scheduler, now: float) -> None:
        """Read the answers that have come, end the requests of grammars that have failed, and charge tenants."""
        self.poll(0)
        for process in self._processes.values():
            while process.failed:
                constraint = process.failed.pop()
                if (request := constraint.request()) is not None:
                    scheduler.finish(request, FinishReason.ERROR, now, constraint.error)
            while process.seconds:
                tenant, seconds = process.seconds.popitem()
                if isinstance(scheduler.turns, FairQueues):
                    scheduler.turns.charge(tenant, seconds * TOKENS_PER_SECOND)

    def poll(self, timeout: float) -> None:
        """Send what waits and read answers; wait for these so many seconds if there is none."""
        for process in self._processes.values():
            process.send()
        for key, _ in self._selector.select(timeout):
            key.data.read()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()
        self.server.close()
        self._selector.close()

    def work(self, core: EngineCore[Scheduler, Any], _: Send) -> LoopHooks:
        """What goes on beside the steps of an engine."""
        core.observers.append(self)
        return LoopHooks(descriptors=(self.fileno(),), before_step=lambda: self.receive(core.scheduler, core.clock()))
