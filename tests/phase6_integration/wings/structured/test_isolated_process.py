"""Grammars that are followed in other processes: the engine gets the masks of phase 2, waits for none, and outlives all
that a grammar may do. The oracle is a Constraint in this process."""

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from phase0_request import FinishReason, Request, SamplingParams
from phase0_request.batch import GRAMMAR_REFUSED
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.sampling.constraints import Constraint, fill_masks
from phase5_continuous import Scheduler
from phase6_integration.process.messages import Frames, frame
from phase6_integration.wings.structured import isolated_grammars, isolated_process
from phase6_integration.wings.structured.grammar_process import COMPILING, Answers, Child, FollowBatch, to_child
from phase6_integration.wings.structured.isolated_grammars import IsolatedGrammars
from phase6_integration.wings.structured.isolated_process import IsolatedConstraint
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


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Steps wait as long as it takes, and for nothing if the processes do not answer."""
    monkeypatch.setattr(isolated_process, "PATIENCE", 60.0)
    with closing(Here()) as processes:
        yield processes


@pytest.fixture
def silent(here: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Processes that answer only when a test says so."""
    monkeypatch.setattr(isolated_process, "PATIENCE", 0.0)
    here.answers = False
    return here


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


def bits(here: Here, rows: Sequence[tuple[int, Any, int]], draft: Sequence[int] = ()) -> tuple[Any, dict[int, Any]]:
    filled = here.start([(*row, draft) for row in rows])()
    return filled.bits.numpy().view(np.uint32), dict(filled.late)


@pytest.mark.parametrize("seed", range(6))
def test_masks_and_forced_tokens_are_those_of_a_constraint_in_this_process(here: Here, seed: int) -> None:
    """Along random outputs, with steps that are void, processes that die between two tokens, and lists beside it."""
    rng = random.Random(seed)
    params: dict[str, Any] = rng.choice([{}, {"bad_words": [[9], [300, 5]]}, {"logprobs": 0}])
    made = request(**params)
    constraint, oracle = constraint_of(here, made), Constraint(made, SIZE, GRAMMARS)
    output = made.output_tokens
    while True:
        index = len(output)
        draft = rng.choice([[], [9, 9], TOKENIZER.encode('{"x":12}', False)[index : index + 3]])
        masks, late = bits(here, [(0, constraint, index)], draft)
        assert not late
        assert (masks == fill_masks(oracle.places(index, draft), SIZE)).all()
        mask = masks[0]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        for follower in (constraint, oracle):
            follower.take(index, token)
        forced = constraint.forced(index)
        assert forced == oracle.forced(index)
        constraint.take(index, token)
        assert constraint.forced(index) == forced, "an output may be read twice"
        if rng.random() < 0.2:
            continue  # the step is void: the token is drawn again
        output += [token, *(forced.tokens if forced else ())]
        if token in EOS or (forced and forced.ends) or len(output) > 60:
            return
        if rng.random() < 0.2:
            here.die()


def test_a_mask_that_is_not_ready_is_late_and_nothing_waits_for_it(silent: Here) -> None:
    made, plain = request(), request("plain", grammar=None, allowed_token_ids=[5])
    constraint, listed = constraint_of(silent, made), silent.of(plain)
    (late_bits, other_bits), late = bits(silent, [(3, constraint, 0), (4, listed, 0)])
    assert [*late] == [3]
    assert not late_bits.any()
    assert other_bits.any()
    assert not constraint.done()
    silent.turn()
    assert constraint.done()
    assert not bits(silent, [(3, constraint, 0)])[1]


def test_forced_tokens_that_come_too_late_are_drawn(silent: Here) -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("abc+d"))
    constraint, tokens = constraint_of(silent, made), [TOKENIZER.encode(letter, False)[0] for letter in "abc"]
    silent.turn()
    constraint.take(0, tokens[0])
    assert constraint.forced(0) is None
    made.output_tokens.append(tokens[0])
    assert bits(silent, [(0, constraint, 1)])[1] == {0: constraint}
    for _ in range(2):  # the answer behind the forced tokens, then the mask that was asked for
        silent.turn()
    (mask,), late = bits(silent, [(0, constraint, 1)])
    if late:
        silent.turn()
        (mask,), late = bits(silent, [(0, constraint, 1)])
    assert not late
    assert mask[tokens[1] // 32] == 1 << tokens[1] % 32, "b is the only one, and is drawn"


def test_a_token_behind_one_that_was_not_drawn_is_late_too(here: Here) -> None:
    _, (constraint,) = several(here, "")
    assert bits(here, [(0, constraint, 1)])[1] == {0: constraint}


def test_tokens_that_are_drawn_before_an_answer_are_sent_together(silent: Here) -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("[a-z]+"))
    constraint = constraint_of(silent, made)
    silent.turn()
    for index, token in enumerate(TOKENIZER.encode(letter, False)[0] for letter in "abc"):
        constraint.take(index, token)
        made.output_tokens.append(token)
        silent.poll()
    for _ in range(2):
        silent.turn()
    assert [message.start for batch in silent.made[0].batches for message in batch.follow] == [0, 0, 1]
    assert constraint.done()


def test_requests_that_have_ended_are_forgotten_by_their_process(silent: Here) -> None:
    made = several(silent, *"aa")
    for _ in range(2):
        silent.turn()
    assert (len(made), len(silent.made[0].child._constraints)) == (2, 2)
    del made
    silent.turn()
    assert not silent.made[0].child._constraints


def test_what_kills_its_process_alone_has_failed_and_the_others_are_followed_on(silent: Here) -> None:
    _, (first, second) = several(silent, "", "")
    silent.turn()
    assert first.done()
    silent.die()  # with the second one's grammar
    assert (first.error, second.error) == (None, isolated_process.TOO_MUCH)
    first.take(0, BRACE)
    silent.turn()
    assert first.done() or first.error is None
    assert [message.tokens for batch in silent.made[1].batches for message in batch.follow] == [[BRACE]]


def three_that_draw_together(silent: Here) -> tuple[list[Request], list[IsolatedConstraint]]:
    """Requests of which the process has one batch of tokens to answer."""
    made, constraints = several(silent, "", "", "")
    for _ in made:
        silent.turn()
    for constraint in constraints:
        constraint.take(0, BRACE)
    silent.poll()
    return made, constraints


def test_after_a_death_with_several_requests_each_is_sent_alone_and_one_fails(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    silent.die()
    for _ in range(2):
        silent.turn()
    silent.die()
    assert [one.error for one in constraints] == [None, None, isolated_process.TOO_MUCH]
    assert [len(batch.follow) for batch in silent.made[1].batches] == [1, 1, 1]
    for one in made[:2]:
        one.output_tokens.append(BRACE)
    assert [one.done() for one in constraints[:2]] == [True, True]


def test_a_request_is_not_blamed_for_one_that_has_ended_meanwhile(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    del made[:2], constraints[:2]  # their clients have left, and a token of theirs kills the process
    silent.die()
    silent.turn()
    assert constraints[0].error is None


@pytest.mark.parametrize("answer", [None, b"\xff\xff\xff\xff nonsense", b"\0\0\0\1\xff"])
def test_a_process_that_does_not_answer_or_writes_nonsense_is_given_up(
    silent: Here, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (constraint,) = made = several(silent, "")
    silent.poll()
    assert (len(made), constraint.error) == (2, None)
    if answer is None:
        monkeypatch.setattr(isolated_process, "STALLED", -1.0)
    else:
        silent.made[0].connection.sendall(answer)
    silent.poll()
    assert constraint.error == isolated_process.TOO_MUCH


def test_processor_time_is_charged_to_the_clients_that_have_requests_and_a_death_as_the_limit(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "PROCESSES", 1)
    monkeypatch.setattr(isolated_process, "PATIENCE", 1.0)
    scheduler = Scheduler(PagedCache(64, 4))
    made, constraints = several(silent, *"aab")
    for one in made:
        scheduler.submit(one)
    served = scheduler.admission.share.served
    before = dict(served)
    silent.poll()
    silent.made[0].send(Answers(seconds=3.0))
    silent.receive(scheduler, 0.0)
    assert [served[tenant] - before[tenant] for tenant in "ab"] == pytest.approx([2000.0, 1000.0])
    assert [process.patience for process in silent._processes.values()] == [0.0], "no step waits for its next masks"
    silent.die()
    silent.receive(scheduler, 0.0)
    assert sum(served.values()) - sum(before.values()) == pytest.approx(1000 * (3 + COMPILING))
    assert [one.error is None for one in constraints] == [False, True, True]
    assert made[0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("connects", [False, True])
def test_a_process_that_cannot_be_started_is_the_fault_of_no_request(
    silent: Here, connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> socket.socket:
        raise OSError(24, "Too many open files")

    silent.begins = False
    with monkeypatch.context() as patch:
        if not connects:
            patch.setattr(silent, "connect", connect)
        _, (constraint,) = several(silent, "")
        for _ in range(isolated_process.FAILED_STARTS):
            assert constraint.error is None
            silent.die() if connects else silent.poll()
    assert constraint.error == isolated_process.NOT_STARTED
    silent.begins = True
    _, (later,) = several(silent, "")
    silent.turn()
    assert later.done(), "the next one has a process again"


def test_masks_behind_a_draft_are_not_those_of_another_draft(silent: Here) -> None:
    """A request whose mask is late gets another draft at the same place."""
    made = request()
    constraint, oracle = constraint_of(silent, made), Constraint(made, SIZE, GRAMMARS)
    drafts = TOKENIZER.encode('{"x":1', False)[:3], TOKENIZER.encode('{ "x":1', False)[:3], []
    bits(silent, [(0, constraint, 0)], drafts[0])
    silent.turn()
    for draft in drafts:
        wanted = fill_masks(oracle.places(0, draft), SIZE)
        for answered in (False, True):
            masks, late = bits(silent, [(0, constraint, 0)], draft)
            assert not late
            assert (masks[0] == wanted[0]).all()
            made_already = masks.any(axis=1)
            assert (masks == wanted).all() if answered else (masks[made_already] == wanted[made_already]).all()
            silent.turn()


def test_a_mask_that_is_on_its_way_is_used_though_a_draft_has_come(silent: Here) -> None:
    made = request()
    constraint, oracle = constraint_of(silent, made), Constraint(made, SIZE, GRAMMARS)
    draft = TOKENIZER.encode('{"x":1', False)[:3]
    bits(silent, [(0, constraint, 0)])
    bits(silent, [(0, constraint, 0)], draft)
    silent.turn()
    masks, late = bits(silent, [(0, constraint, 0)], draft)
    assert not late
    assert (masks[0] == fill_masks(oracle.places(0, draft), SIZE)[0]).all()


def test_a_token_that_replaces_an_unanswered_one_is_sent_when_that_is_answered(silent: Here) -> None:
    """The answer to the first is about another place of the output."""
    _, constraints = three_that_draw_together(silent)
    assert constraints[0].ask(0)
    silent.turn()
    assert not constraints[0].done()
    silent.turn()
    assert constraints[0].done()
    (mask,), late = bits(silent, [(0, constraints[0], 0)])
    assert not late
    assert mask[BRACE // 32] & 1 << BRACE % 32


def test_grammars_of_requests_that_end_while_another_is_compiled_are_never_sent(silent: Here) -> None:
    first = request("first")
    opened = constraint_of(silent, first)
    silent.poll()
    for number in range(50):
        constraint_of(silent, request(str(number)))
    last = request("last")
    constraint = constraint_of(silent, last)
    for _ in range(2):
        silent.turn()
    assert opened.done()
    assert constraint.done()
    assert sum(len(batch.follow) for batch in silent.made[0].batches) == 2


def test_clients_that_share_a_process_have_their_grammars_compiled_in_turns(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "PROCESSES", 1)
    made, constraints = several(silent, *"aaabbc")
    for _ in made:
        silent.turn()
    order = [message.key for batch in silent.made[0].batches for message in batch.follow]
    assert [constraints[key].tenant for key in order] == [*"abcaba"]


def test_grammars_are_compiled_in_turns_with_tokens_that_keep_coming(silent: Here) -> None:
    _, constraints = three_that_draw_together(silent)
    _, waiting = several(silent, "", "", "")
    for place in range(4):
        for constraint in constraints:  # the batch before is not answered
            constraint.take(0, BRACE) if place % 2 else constraint.ask(0)
        silent.turn()
    assert [len(batch.follow) for batch in silent.made[0].batches][3:] == [3, 1, 3, 1]
    assert [constraint.done() for constraint in waiting] == [True, True, False]


def test_a_process_that_has_grown_is_replaced_and_no_request_is_blamed(silent: Here) -> None:
    made = request()
    constraint = constraint_of(silent, made)
    silent.turn()
    constraint.take(0, BRACE)
    silent.poll()
    process = silent.made[0]
    (batch,) = process.read()
    forced, masks = process.child.follow(batch), process.child.masks()
    process.send(forced, Answers(masks=masks.masks, leaves=True))
    silent.poll()
    assert (len(silent.made), constraint.error) == (1, None)
    made.output_tokens += [BRACE, *forced.forced[constraint.key].tokens]
    assert constraint.done(), "its mask came with the last message"
    assert constraint.ask(0)
    silent.turn()
    assert len(silent.made) == 2
    assert silent.made[1].batches[0].follow[0].params is not None


def test_clients_have_processes_of_their_own_as_long_as_there_are_any(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "PROCESSES", 2)
    made = several(silent, *"abc")
    silent.poll()
    assert len(silent.made) == 2, "both have requests: the third shares"
    del made
    made = several(silent, "d")
    silent.poll()
    assert (len(made), len(silent.made)) == (2, 3), "an idle one is ended for it"


def test_a_grammar_that_is_none_ends_its_request_at_once(here: Here) -> None:
    scheduler, made = Scheduler(PagedCache(64, 4)), request(grammar="start: missing")
    scheduler.submit(made)
    constraint = constraint_of(here, made)
    assert not bits(here, [(0, constraint, 0)])[1]
    assert (constraint.error or "").startswith(f"{GRAMMAR_REFUSED}: the grammar cannot be used: at 1(8): unknown name")
    here.receive(scheduler, 0.0)
    (event,) = scheduler.drain()
    assert (event.request, event.finish_reason, made.error) == (made, FinishReason.ERROR, constraint.error)
