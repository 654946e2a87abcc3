"""Processes of grammars that are in the test: they answer when it says so."""

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from phase0_request import Request, SamplingParams
from phase0_request.tokenizer import BUNDLED
from phase6_integration.extras.structured.grammar_process import Answers, Child, FollowBatch, to_child
from phase6_integration.extras.structured.isolated_grammars import IsolatedGrammars
from phase6_integration.extras.structured.isolated_process import IsolatedConstraint
from phase6_integration.process.messages import Frames, frame
from tests.phase6_integration.cities import TOKENIZER, grammars

SIZE, EOS = TOKENIZER.vocab_size, TOKENIZER.eos_ids
GRAMMARS = grammars(TOKENIZER)
POINT = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)
(BRACE,) = TOKENIZER.encode("{", False)


class Process:
    """The other end of a connection: a child that answers when a test says so."""

    def __init__(self, begins: bool) -> None:
        self.engine, self.connection = socket.socketpair()
        self.connection.setblocking(False)
        self.child = Child(GRAMMARS, SIZE)
        self.frames = Frames(to_child)
        self.batches: list[FollowBatch] = []  # that it has read
        if begins:
            self.send(Answers())

    def send(self, *messages: Any) -> None:
        self.connection.sendall(b"".join(map(frame, messages)))

    def answer(self) -> None:
        """Answer all that has arrived."""
        for batch in self.read():
            self.send(self.child.follow(batch), self.child.masks())

    def read(self) -> list[FollowBatch]:
        try:
            batches = [*self.frames.feed(self.connection.recv(1 << 20))]
        except BlockingIOError:
            return []
        self.batches += batches
        return batches

    def dies(self) -> None:
        self.read()
        self.connection.close()


class Here(IsolatedGrammars):
    """The processes of a test. With `answers`, they answer whenever the engine waits for them."""

    def __init__(self) -> None:
        super().__init__(SIZE, str(BUNDLED), EOS)
        self.server = self  # type: ignore[assignment]
        self.made: list[Process] = []
        self.answers = self.begins = True
        self.has_answered = False

    def connect(self) -> socket.socket:
        self.made.append(Process(self.begins))
        return self.made[-1].engine

    def poll(self, timeout: float = 0.0) -> None:
        super().poll(0.0)
        if timeout and self.answers:
            for process in self.made:
                if process.connection.fileno() >= 0:
                    process.answer()
            super().poll(0.0)

    def turn(self, number: int = -1) -> None:
        """A process answers, and the engine reads that."""
        self.poll()
        self.made[number].answer()
        self.poll()

    def die(self, number: int = -1) -> None:
        self.poll()
        self.made[number].dies()
        self.poll()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._selector.close()
        for process in self.made:
            process.connection.close()


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
        silent.turn()
    for constraint in constraints:
        constraint.take(0, BRACE)
    silent.poll()
    return made, constraints


def bits(here: Here, rows: Sequence[tuple[int, Any, int]], draft: Sequence[int] = ()) -> tuple[Any, dict[int, Any]]:
    filled = here.start([(*row, draft) for row in rows])()
    return filled.bits.numpy().view(np.uint32), dict(filled.late)
