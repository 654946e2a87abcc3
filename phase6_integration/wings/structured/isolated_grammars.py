"""IsolatedConstraints: constraints in other processes, one for each tenant: a server trusts no grammar of a client.

The engine waits PATIENCE for a mask at most. A request without its mask draws no token in the step, and takes part in
no step until the mask is there. A process that dies fails one request: the one that it could not answer.
"""

import selectors
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from phase0_request import safe_path
from phase0_request.batch import WaitHandle
from phase0_request.request import Request
from phase2_prefill_decode.sampling.constraints import Constraints, Filled, Follower, StepMasks, fill_masks, words
from phase2_prefill_decode.sampling.sampler import Sampler
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.engine_process import Made, bundled_engine
from phase6_integration.wings.structured.grammar_client import GrammarClient, IsolatedConstraint

TOKENS_PER_SECOND = 1000  # that a tenant is charged with for the processor time of its grammars
CHILDREN = 8  # processes at a time; with more tenants than that, some share one
# The arenas of malloc, 64 MB of addresses for each thread, would count as memory that a process has taken.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, slots=True)
class IsolatedMasks:
    """The masks of a step. Rows of lists only are filled here, those of grammars in their processes."""

    rows: Sequence[tuple[int, Any, int]]
    numbers: Tensor
    vocab_size: int

    @property
    def in_flight(self) -> bool:
        """As Masks.in_flight."""
        return any(index > len(constraint.output) for _, constraint, index in self.rows)

    def start(self) -> "IsolatedMasks":
        """Have them made, and `result` collects them. Mostly they are on their way since the token before was taken."""
        for _, constraint, index in self.rows:
            if isinstance(constraint, IsolatedConstraint):
                constraint.ask(index)
        return self

    def result(self) -> Filled:
        return self.filled()

    def filled(self) -> Filled:
        """The masks that are ready, and the rows without one, which have no bits."""
        started = time.monotonic()
        self.start()
        bits, late = np.zeros((len(self.rows), words(self.vocab_size)), np.uint32), dict[int, WaitHandle]()
        for number, (row, constraint, index) in enumerate(self.rows):
            if not isinstance(constraint, IsolatedConstraint):
                bits[number] = fill_masks([(constraint, index)], self.vocab_size)[0]
                continue
            mask = constraint.mask(index, started)
            if mask is not None:
                bits[number] = mask
            elif constraint.error is None:
                late[row] = constraint
        return Filled(torch.from_numpy(bits.view(np.int32)), late)


class IsolatedConstraints(Constraints):
    """Makes the constraints of requests in processes, which it starts when the first grammar comes."""

    def __init__(self, vocab_size: int, directory: str, eos_ids: Collection[int]) -> None:
        super().__init__(vocab_size, None)
        self._arguments = [directory, str(vocab_size), *map(str, sorted(eos_ids))]
        self._parent: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._selector = selectors.DefaultSelector()
        self._clients: list[GrammarClient] = []  # the latest last
        self._keys = count()
        self._ended: deque[tuple[GrammarClient, int]] = deque()
        self._seconds: dict[str, float] = defaultdict(float)  # that grammars have taken, by tenant, not charged yet

    def of(self, request: Request) -> Follower:
        """A request's constraint. Its grammar is compiled from now on."""
        if request.params.grammar is None:
            return super().of(request)
        client, key = self._client_of(request.tenant), next(self._keys)
        constraint = IsolatedConstraint(key, request, client)
        client.add(constraint, request.tenant)
        constraint.ask(0)
        finalize(request, self._ended.append, (client, key)).atexit = False
        return constraint

    def masks(self, rows: Sequence[tuple[int, Any, int]], numbers: Tensor) -> StepMasks:
        return IsolatedMasks(rows, numbers, self.vocab_size)

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has come."""
        return self._selector.fileno()

    def receive(self, timeout: float) -> None:
        """Read answers, and wait for them so many seconds if there is none."""
        while self._ended:
            client, key = self._ended.popleft()
            client.drop(key)
        for client in self._clients:
            client.check(time.monotonic())
        for registered, events in self._selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                registered.data.flush()
            if events & selectors.EVENT_READ:
                registered.data.read()

    def spent(self, client: GrammarClient, seconds: float) -> None:
        """Note the processor time of masks: all requests of the process have an equal share in it."""
        for tenant in client.tenants:
            self._seconds[tenant] += seconds / len(client)

    def take_seconds(self) -> Mapping[str, float]:
        """The processor time of each tenant's grammars since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    # Processes.

    def _client_of(self, tenant: str) -> GrammarClient:
        """The process of a tenant. With too many of them, the idle one that is longest so is ended for it, or one is
        shared."""
        clients = self._clients
        client = next((one for one in clients if one.tenant == tenant), None)
        if client is None and len(clients) >= CHILDREN:
            idle = next((one for one in clients if not len(one)), None)
            if idle is None:
                return min(clients, key=len)
            idle.close()
            clients.remove(idle)
        if client is None:
            client = GrammarClient(self, tenant)
        else:
            clients.remove(client)
        clients.append(client)
        return client

    def connect(self, client: GrammarClient) -> socket.socket:
        """Have a child forked, and connect to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._connection(), [b"\0"], [theirs.fileno()])
            except OSError:  # the parent has ended: the next one is started for the next child
                self._stop()
        self.register(ours, client)
        return ours

    def register(self, connection: socket.socket, client: GrammarClient) -> None:
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _connection(self) -> socket.socket:
        if self._parent is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [
                    sys.executable,
                    "-m",
                    "phase6_integration.wings.structured.grammar_process",
                    str(theirs.fileno()),
                ]
                process = subprocess.Popen(
                    [*command, *self._arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C reaches the server only
                    env={**safe_path.environment(), **ENVIRONMENT},
                )
            self._parent = process, ours
        return self._parent[1]

    def watch(self, connection: socket.socket, client: GrammarClient, writes: bool) -> None:
        self._selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0), client)

    def unwatch(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)

    def close(self) -> None:
        """End all processes."""
        for client in self._clients:
            client.close()
        self._stop()

    def _stop(self) -> None:
        """End the parent of the processes, which forks no more."""
        if self._parent is not None:
            process, connection = self._parent
            self._parent = None
            connection.close()
            process.kill()
            process.wait()


class IsolatedGrammars:
    """The work for grammars beside the steps: they are compiled while their requests wait, and charged."""

    def __init__(self, sampler: Sampler, options: EngineOptions) -> None:
        """Have a sampler follow grammars in processes from now on."""
        directory = directory_of(options.tokenizer or options.model, options.revision, options.download_dir)
        self.constraints = IsolatedConstraints(sampler.vocab_size, str(directory), sampler.eos_ids)
        sampler.constraints = self.constraints
        self.fileno = self.constraints.fileno
        self.prepare = sampler.constraint_of

    def receive(self, scheduler: Scheduler) -> None:
        """Read the answers that have come, and charge tenants for the time of their grammars."""
        self.constraints.receive(0)
        for tenant, seconds in self.constraints.take_seconds().items():
            scheduler.charge(tenant, seconds * TOKENS_PER_SECOND)


def isolating_engine(options: EngineOptions) -> Made:
    """The bundled engine, with the grammars of clients in processes of their own: a factory for AsyncEngine."""
    return bundled_engine(options, IsolatedGrammars)
