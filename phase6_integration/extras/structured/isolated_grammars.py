"""IsolatedGrammars: constraints that another process follows, since a server trusts no client's grammar.

The engine waits at most PATIENCE for a mask. A request without its mask draws no token in the step, and takes part in
no further step until the mask is there. A process that dies fails at most one request: the one that it had alone.
"""

from collections.abc import Callable
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
from phase2_prefill_decode.extras.grammar.masks import Masks, masks_of
from phase2_prefill_decode.sampling.sampler import Sampler
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.loop_hooks import LoopHooks, Send
from phase6_integration.engine.options import EngineOptions
from phase6_integration.extras.structured.grammar_process import GrammarProcess, start_worker
from phase6_integration.extras.structured.isolated_constraint import IsolatedConstraint

TOKENS_PER_SECOND = 1000  # that a tenant is charged with for the processor time of its grammars


class IsolatedGrammars(Constraints, CoreObserver):
    """Makes constraints in a process, which starts with the first grammar and works beside the steps."""

    def __init__(self, vocab_size: int, masks: Masks, process: GrammarProcess) -> None:
        """From now on, these masks are made in the process."""
        super().__init__(vocab_size, None)
        self.process = process
        self._masks = masks
        self._keys = count()
        masks.constraints = self

    @classmethod
    def install(cls, sampler: Sampler, options: EngineOptions) -> "IsolatedGrammars":
        """Have a sampler follow grammars in a process from now on."""
        directory = directory_of(options.tokenizer or options.model, options.revision, options.download_dir)
        masks, size = masks_of(sampler), sampler.vocab_size
        return cls(size, masks, GrammarProcess(partial(start_worker, str(directory), size, masks.eos_ids)))

    def of(self, request: Request) -> Follower:
        """A request's constraint. Compiling its grammar starts now."""
        if request.params.grammar is None:
            return super().of(request)
        return IsolatedConstraint(next(self._keys), request, self.process)

    def submitted(self, request: Request) -> None:
        """Compile its grammar while it waits and while its prompt is computed."""
        if request.params.grammar is not None:
            self._masks.prepare(request)

    def start(self, rows: Rows) -> Callable[[], Filled]:
        """Have the masks made. Usually they are on their way since the previous token was taken."""
        for _, constraint, index, draft in rows:
            if isinstance(constraint, IsolatedConstraint):
                constraint.ask(index)
                constraint.verify(draft)
        self.process.poll()
        return partial(self.fill, rows)

    def fill(self, rows: Rows) -> Filled:
        """The masks that are ready, and the rows without one, which have no bits. Masks of lists are filled here."""
        started = self.process.clock()
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

    def receive(self, scheduler: Scheduler, now: float) -> None:
        """Read the answers that have arrived, end the requests whose grammars have failed, and charge tenants."""
        self.process.poll()
        while self.process.failed:
            constraint = self.process.failed.pop()
            if (request := constraint.request()) is not None:
                scheduler.finish(request, FinishReason.ERROR, now, constraint.error)
        while self.process.seconds:
            tenant, seconds = self.process.seconds.popitem()
            if isinstance(scheduler.turns, FairQueues):
                scheduler.turns.charge(tenant, seconds * TOKENS_PER_SECOND)

    def work(self, core: EngineCore[Scheduler, Any], _: Send) -> LoopHooks:
        """What goes on beside the steps of an engine."""
        core.observers.append(self)
        return LoopHooks(
            descriptors=(self.process.fileno(),), before_step=lambda: self.receive(core.scheduler, core.clock())
        )
