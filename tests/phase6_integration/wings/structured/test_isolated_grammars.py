"""Grammars that are followed in other processes: the engine gets the masks of phase 2, waits for none, and outlives all
that a grammar may do. The oracle is a Constraint in this process."""

import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from phase0_request import Request, SamplingParams
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.sampling.constraints import Constraint, Grammars, fill_masks
from phase6_integration.process.messages import Frames, frame
from phase6_integration.wings.structured import grammar_client, isolated_grammars
from phase6_integration.wings.structured.grammar_client import GrammarClient, IsolatedConstraint
from phase6_integration.wings.structured.grammar_process import (
    Child,
    ChildReady,
    CpuTime,
    Leaving,
    Open,
    Take,
    ToChild,
    to_child,
)
from phase6_integration.wings.structured.isolated_grammars import IsolatedConstraints

TOKENIZER = Tokenizer.from_pretrained()
SIZE, EOS = TOKENIZER.vocab_size, TOKENIZER.eos_ids
GRAMMARS = Grammars(TOKENIZER, SIZE, EOS)
POINT = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)


@dataclass
class Process:
    """The other end of a connection: a child that answers when a test says so."""

    client: GrammarClient
    connection: socket.socket
    child: Child = field(default_factory=lambda: Child(GRAMMARS, SIZE))
    frames: Frames = field(default_factory=lambda: Frames(to_child))
    read: list[ToChild] = field(default_factory=list)

    def take(self) -> list[ToChild]:
        """Read what has arrived."""
        self.connection.setblocking(False)
        try:
            found = [*self.frames.feed(self.connection.recv(1 << 20))]
        except BlockingIOError:
            found = []
        self.read += found
        return found

    def answer(self) -> None:
        """Answer all that has arrived."""
        self.reply(self.take())

    def reply(self, messages: list[ToChild]) -> None:
        followed, masks = self.child.answer(messages)
        self.connection.sendall(b"".join(map(frame, [*followed, *masks()])))

    def dies(self) -> None:
        self.take()
        self.connection.close()


class Here(IsolatedConstraints):
    """The processes of a test. With `answers`, they answer whenever the engine would wait for them."""

    def __init__(self) -> None:
        super().__init__(SIZE, str(BUNDLED), EOS)
        self.processes: list[Process] = []
        self._answers = True

    @property
    def answers(self) -> bool:
        return self._answers

    @answers.setter
    def answers(self, answers: bool) -> None:
        self._answers = answers
        for client in self._clients:
            client.patience = 60.0 if answers else 0.0

    def connect(self, client: GrammarClient) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.register(ours, client)
        theirs.sendall(frame(ChildReady(os.getpid())))
        self.processes.append(Process(client, theirs))
        client.patience = 60.0 if self.answers else 0.0
        return ours

    def close(self) -> None:
        super().close()
        self._selector.close()
        for process in self.processes:
            process.connection.close()

    def receive(self, timeout: float) -> None:
        if timeout and self.answers:
            for process in self.processes:
                if process.connection.fileno() >= 0:
                    process.answer()
        super().receive(0)


@pytest.fixture
def here() -> Iterator[Here]:
    with closing(Here()) as processes:
        yield processes


def request(name: str = "a", tenant: str = "", **params: Any) -> Request:
    return Request(name, (1,), SamplingParams(**{"max_tokens": 500, **params}), tenant=tenant)


def constraint_of(here: Here, made: Request) -> IsolatedConstraint:
    found = here.of(made)
    assert isinstance(found, IsolatedConstraint)
    return found


def bits(here: Here, rows: Sequence[tuple[int, Any, int]]) -> tuple[Any, dict[int, Any]]:
    filled = here.masks(rows, torch.zeros(len(rows), dtype=torch.int64)).start().result()
    return filled.bits.numpy().view(np.uint32), dict(filled.late)


@pytest.mark.parametrize("seed", range(6))
def test_masks_and_forced_tokens_are_those_of_a_constraint_in_this_process(here: Here, seed: int) -> None:
    """Along random outputs, with steps that are void, processes that die between two tokens, and lists beside it."""
    rng = random.Random(seed)
    params: dict[str, Any] = {"grammar": POINT} | rng.choice([{}, {"bad_words": [[9], [300, 5]]}, {"logprobs": 0}])
    made = request(**params)
    of, oracle = constraint_of(here, made), Constraint(made, SIZE, GRAMMARS)
    output = made.output_tokens
    while True:
        index = len(output)
        (mask,), late = bits(here, [(0, of, index)])
        (expected,) = fill_masks([(oracle, index)], SIZE)
        assert not late
        assert (mask == expected).all()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        for one in (of, oracle):
            one.take(index, token)
        forced = of.forced(index)
        assert forced == oracle.forced(index)
        of.take(index, token)
        assert of.forced(index) == forced, "an output may be read twice"
        if rng.random() < 0.2:
            continue  # the step is void: the token is drawn again
        output += [token, *(forced.tokens if forced else ())]
        if token in EOS or (forced and forced.ends) or len(output) > 60:
            return
        if rng.random() < 0.2:
            here.processes[-1].dies()
            here.receive(0)


def test_a_mask_that_is_not_ready_is_late_and_nothing_waits_for_it(here: Here) -> None:
    here.answers = False
    made, plain = request(grammar=POINT), request("plain", allowed_token_ids=[5])
    of, listed = constraint_of(here, made), here.of(plain)
    (late_bits, other_bits), late = bits(here, [(3, of, 0), (4, listed, 0)])
    assert [*late] == [3]
    assert not late_bits.any()
    assert other_bits.any()
    assert not of.done()
    here.processes[0].answer()
    here.receive(0)
    assert of.done()
    assert not bits(here, [(3, of, 0)])[1]


def test_forced_tokens_that_come_too_late_are_drawn(here: Here) -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("abc+d"))
    of, tokens = constraint_of(here, made), [TOKENIZER.encode(letter, False)[0] for letter in "abc"]
    assert not bits(here, [(0, of, 0)])[1]
    here.answers = False
    of.take(0, tokens[0])
    assert of.forced(0) is None
    made.output_tokens.append(tokens[0])
    here.answers = True
    (mask,), late = bits(here, [(0, of, 1)])
    assert not late
    assert mask[tokens[1] // 32] == 1 << tokens[1] % 32, "b is the only one, and is drawn"


def test_a_token_behind_one_that_was_not_drawn_is_late_too(here: Here) -> None:
    made = request(grammar=POINT)
    of = constraint_of(here, made)
    assert bits(here, [(0, of, 1)])[1] == {0: of}


def test_what_kills_its_process_alone_has_failed_and_the_others_are_followed_on(here: Here) -> None:
    here.answers = False
    made = [request(name, grammar=POINT) for name in "ab"]
    first, second = (constraint_of(here, one) for one in made)
    here.processes[0].answer()
    here.receive(0)
    assert first.done()
    here.processes[0].dies()  # with the second one's grammar
    here.receive(0)
    assert (first.error, second.error) == (None, grammar_client.TOO_MUCH)
    first.take(0, TOKENIZER.encode("{", False)[0])
    here.processes[1].answer()
    assert [type(message) for message in here.processes[1].read] == [Open, Take]
    here.answers = True
    assert not bits(here, [(0, first, 1)])[1]


def test_a_request_is_not_blamed_for_one_that_has_ended_meanwhile(here: Here) -> None:
    here.answers = False
    made = [request(name, grammar=POINT) for name in "ab"]
    first, second = (constraint_of(here, one) for one in made)
    for _ in made:
        here.processes[0].answer()
        here.receive(0)
    for of in (first, second):
        of.take(0, TOKENIZER.encode("{", False)[0])
    del made[0]  # its client has left, and its token kills the process
    here.receive(0)
    here.processes[0].dies()
    here.receive(0)
    assert second.error is None


def test_a_process_that_does_not_answer_is_killed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(grammar_client, "STALLED", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    here.answers = False
    made = request(grammar=POINT)
    of = constraint_of(here, made)
    here.receive(0)
    here.receive(0)
    assert killed
    assert not of.done()


def test_time_is_charged_to_the_clients_that_have_requests_and_a_death_as_the_limit(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "CHILDREN", 1)
    here.answers = False
    made = [request(tenant, tenant, grammar=POINT) for tenant in "aab"]
    all_of = [constraint_of(here, one) for one in made]
    here.processes[0].connection.sendall(frame(CpuTime(3.0)))
    here.receive(0)
    assert here.take_seconds() == {"a": pytest.approx(2.0), "b": pytest.approx(1.0)}
    assert here.take_seconds() == {}
    here.processes[0].dies()
    here.receive(0)
    assert sum(here.take_seconds().values()) == pytest.approx(grammar_client.OPENING)
    assert [of.error is None for of in all_of] == [False, True, True]


def test_a_process_that_writes_what_is_no_message_is_replaced(here: Here) -> None:
    here.answers = False
    made = request(grammar=POINT)
    of = constraint_of(here, made)
    here.processes[0].connection.sendall(b"\xff\xff\xff\xff nonsense")
    here.receive(0)
    assert of.error == grammar_client.TOO_MUCH


def test_without_a_socket_for_a_process_the_request_fails_and_the_engine_lives(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(client: GrammarClient) -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(here, "connect", none)
        made = request(grammar=POINT)
        of = constraint_of(here, made)
    assert of.error == "the process that follows grammars cannot be started"
    later = request("later", grammar=POINT)
    assert not bits(here, [(0, constraint_of(here, later), 0)])[1], "the next one has a process again"


def test_after_a_death_with_several_messages_each_is_sent_alone(here: Here) -> None:
    here.answers = False
    made = [request(str(number), grammar=POINT) for number in range(3)]
    all_of = [constraint_of(here, one) for one in made]
    for _ in made:
        here.processes[0].answer()
        here.receive(0)
    brace = TOKENIZER.encode("{", False)[0]
    for of in all_of:
        of.take(0, brace)
    here.processes[0].dies()
    here.receive(0)
    process, sent = here.processes[1], []
    for _ in range(5):
        process.reply(messages := process.take())
        sent.append(len(messages))
        here.receive(0)
    assert sent == [2, 2, 2, 0, 0], "to begin anew, and what was to be answered"
    assert all(of.error is None for of in all_of)


def test_a_message_that_replaces_an_unanswered_one_is_sent_when_that_is_answered(here: Here) -> None:
    """While each message is sent alone."""
    here.answers = False
    made = [request(str(number), grammar=POINT) for number in range(2)]
    all_of = [constraint_of(here, one) for one in made]
    for _ in made:
        here.processes[0].answer()
        here.receive(0)
    for of in all_of:
        of.take(0, TOKENIZER.encode("{", False)[0])
    here.processes[0].dies()
    here.receive(0)
    assert all_of[0].ask(0)
    for _ in range(5):
        here.processes[1].answer()
        here.receive(0)
    assert all_of[0].done()
    made[1].output_tokens += TOKENIZER.encode("{", False)
    assert all_of[1].done()


def test_requests_that_end_while_another_is_compiled_are_never_sent(here: Here) -> None:
    here.answers = False
    first = request("first", grammar=POINT)
    opened = constraint_of(here, first)
    del first
    for number in range(50):
        constraint_of(here, request(str(number), grammar=POINT))
    last = request("last", grammar=POINT)
    of = constraint_of(here, last)
    here.receive(0)
    for _ in range(2):
        here.processes[0].answer()
        here.receive(0)
    assert of.done()
    assert not opened.done()
    assert sum(isinstance(message, Open) for message in here.processes[0].read) == 2


def test_a_process_that_has_grown_is_replaced_and_no_request_is_blamed(here: Here) -> None:
    here.answers = False
    made = request(grammar=POINT)
    of = constraint_of(here, made)
    here.processes[0].connection.sendall(frame(Leaving()))
    here.receive(0)
    here.processes[1].answer()
    here.receive(0)
    assert of.done()
    assert of.error is None


def test_clients_have_processes_of_their_own_as_long_as_there_are_any(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "CHILDREN", 2)
    made = [request(str(number), tenant=f"{number}", grammar=POINT) for number in range(3)]
    all_of = [here.of(one) for one in made[:2]]
    assert len(here.processes) == 2
    all_of.append(here.of(made[2]))
    assert len(here.processes) == 2, "both have requests: the third shares"
    made.clear()
    all_of.clear()
    here.receive(0)
    constraint_of(here, request("last", tenant="last", grammar=POINT))
    assert len(here.processes) == 3, "an idle one is ended for it"


def test_a_grammar_that_is_none_fails_its_request(here: Here) -> None:
    made = request(grammar="start: missing")
    of = constraint_of(here, made)
    assert not bits(here, [(0, of, 0)])[1]
    assert of.error is not None
    assert of.error.startswith("the grammar cannot be used")


@pytest.fixture(scope="module")
def real() -> Any:
    constraints = IsolatedConstraints(SIZE, str(BUNDLED), EOS)
    yield constraints
    constraints.close()


def until(constraints: IsolatedConstraints, done: Callable[[], bool]) -> None:
    for _ in range(200):
        if done():
            return
        constraints.receive(0.1)
    raise AssertionError("it did not happen")


def test_real_processes_follow_and_end_what_takes_too_long(real: IsolatedConstraints) -> None:
    """An ambiguous grammar with masks of seconds, beside one of another client and one of the same."""
    ambiguous = "start: /[0-9]{20}/ x\nx: W | x x | x W x\nW: /[a-z]/\n"
    names = {"bad": "one", "same": "one", "other": "two"}
    made = {
        name: request(name, tenant, grammar=ambiguous if name == "bad" else POINT) for name, tenant in names.items()
    }
    of = {name: real.of(one) for name, one in made.items()}
    bad, same, other = (of[name] for name in names)
    assert isinstance(bad, IsolatedConstraint)
    assert isinstance(same, IsolatedConstraint)
    assert isinstance(other, IsolatedConstraint)
    until(real, lambda: bad.done() and same.done() and other.done())
    text = TOKENIZER.encode("1" * 20, False) + TOKENIZER.encode("a", False) * 400
    made["bad"].output_tokens += text
    until(real, bad.done)
    assert bad.error is not None
    for name in ("same", "other"):
        made[name].output_tokens += TOKENIZER.encode("{", False)
    until(real, lambda: same.done() and other.done())
    assert same.error is None
    assert other.error is None


def test_deep_grammars_leave_the_engine_alone(real: IsolatedConstraints) -> None:
    deep = "start: " + "(" * 100_000 + '"a"' + ")" * 100_000
    made, other = request("deep", "deep", grammar=deep), request("plain", "deep", grammar=POINT)
    of, plain = real.of(made), real.of(other)
    assert isinstance(of, IsolatedConstraint)
    assert isinstance(plain, IsolatedConstraint)
    until(real, lambda: of.done() and plain.done())
    assert of.error is not None
    assert plain.error is None
