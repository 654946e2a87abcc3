"""The process of grammars as a part of the test: it answers when the test says so, and the clock stands still."""

import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher

from phase0_request import Request, SamplingParams
from phase2_prefill_decode.extras.grammar.constraints import Constraints
from phase2_prefill_decode.extras.grammar.masks import Masks
from phase6_integration.extras.structured.grammar_process import GrammarProcess
from phase6_integration.extras.structured.grammar_worker import Answers, FollowBatch, GrammarWorker, to_worker
from phase6_integration.extras.structured.isolated_constraint import IsolatedConstraint
from phase6_integration.extras.structured.isolated_grammars import IsolatedGrammars
from phase6_integration.process.messages import Frames, frame
from tests.phase6_integration.cities import TOKENIZER, grammars

SIZE, EOS = TOKENIZER.vocab_size, TOKENIZER.eos_ids
GRAMMARS = grammars(TOKENIZER)
POINT = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)
(BRACE,) = TOKENIZER.encode("{", False)


class Worker:
    """One process, and its end of the connection."""

    def __init__(self, begins: bool) -> None:
        self.engine, self.connection = socket.socketpair()
        self.connection.setblocking(False)
        self.worker = GrammarWorker(GRAMMARS, SIZE)
        self.frames = Frames(to_worker)
        self.batches: list[FollowBatch] = []  # that it has read
        self.code = -signal.SIGKILL
        if begins:
            self.send(Answers())

    def send(self, *messages: Any) -> None:
        self.connection.sendall(b"".join(map(frame, messages)))

    def answer(self) -> None:
        """Answer all that has arrived."""
        for batch in self.read():
            self.send(self.worker.follow(batch), self.worker.masks())

    def read(self) -> list[FollowBatch]:
        try:
            batches = [*self.frames.feed(self.connection.recv(1 << 20))]
        except BlockingIOError:
            return []
        self.batches += batches
        return batches

    def ends(self, code: int) -> None:
        self.read()
        self.code = code
        self.connection.close()

    def kill(self) -> None:
        self.connection.close()

    def wait(self) -> int:
        return self.code


class Process(GrammarProcess):
    """With `answers`, the workers answer whenever the engine waits for them."""

    def __init__(self) -> None:
        super().__init__(self.start, lambda: self.now)
        self.made: list[Worker] = []
        self.answers = self.begins = True
        self.now = 0.0

    def start(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        self.made.append(Worker(self.begins))
        return cast("subprocess.Popen[bytes]", self.made[-1]), self.made[-1].engine

    def poll(self, timeout: float = 0.0) -> None:
        super().poll(0.0)
        if timeout and self.answers:
            self.made[-1].answer()
            super().poll(0.0)

    def turn(self) -> None:
        """The worker answers, and the engine reads that."""
        self.poll()
        self.made[-1].answer()
        self.poll()

    def end(self, code: int = -signal.SIGPROF) -> None:
        """The worker ends: by the limit of time, unless it is another code."""
        self.poll()
        self.made[-1].ends(code)
        self.poll()


class Here(IsolatedGrammars):
    process: Process

    def __init__(self) -> None:
        super().__init__(SIZE, Masks(Constraints(SIZE, None)), Process())


def request(name: str = "a", tenant: str = "", **params: Any) -> Request:
    return Request(name, (1,), SamplingParams(**{"max_tokens": 500, "grammar": POINT, **params}), tenant=tenant)


def constraint_of(grammars: IsolatedGrammars, request: Request) -> IsolatedConstraint:
    constraint = grammars.of(request)
    assert isinstance(constraint, IsolatedConstraint)
    return constraint


def several(grammars: IsolatedGrammars, *tenants: str) -> tuple[list[Request], list[IsolatedConstraint]]:
    """A request of each of these tenants, and their constraints."""
    requests = [request(str(number), tenant) for number, tenant in enumerate(tenants)]
    return requests, [constraint_of(grammars, one) for one in requests]


def three_that_draw_together(silent: Here) -> tuple[list[Request], list[IsolatedConstraint]]:
    """Requests of which the process has one batch of tokens to answer."""
    made, constraints = several(silent, "", "", "")
    for _ in made:
        silent.process.turn()
    for constraint in constraints:
        constraint.take(0, BRACE)
    silent.process.poll()
    return made, constraints


def bits(here: Here, rows: Sequence[tuple[int, Any, int]], draft: Sequence[int] = ()) -> tuple[Any, dict[int, Any]]:
    filled = here.start([(*row, draft) for row in rows])()
    return filled.bits.numpy().view(np.uint32), dict(filled.late)
