"""The process that follows grammars: the engine outlives all that a grammar may do to it, and clients share it."""

import signal
import socket
import subprocess

import pytest
from llguidance import LLMatcher

from phase0_request import FinishReason
from phase1_kv_pool import PagedCache
from phase5_continuous import Scheduler
from phase5_continuous.extras.fairness import FairQueues
from phase6_integration.extras.structured.grammar_process import KILLS, NOT_STARTED, SILENT, STARTS, TOO_MUCH
from phase6_integration.extras.structured.grammar_worker import COMPILING, Answers
from tests.phase6_integration.extras.structured.isolated import (
    BRACE,
    Here,
    constraint_of,
    request,
    several,
    three_that_draw_together,
)

BRACES = LLMatcher.grammar_from_regex(r"\{+")


def test_requests_that_have_ended_are_forgotten_by_the_process(silent: Here) -> None:
    made = several(silent, *"aa")
    for _ in range(2):
        silent.process.turn()
    assert (len(made), len(silent.process.made[0].worker._constraints)) == (2, 2)
    del made
    silent.process.turn()
    assert not silent.process.made[0].worker._constraints


def test_a_grammar_that_ends_the_process_has_failed_and_the_others_are_followed_on(silent: Here) -> None:
    made, (first, second) = several(silent, "", "")
    silent.process.turn()
    assert first.done()
    silent.process.end()  # with the second one's grammar
    assert (first.error, second.error) == (None, TOO_MUCH)
    first.take(0, BRACE)
    silent.process.turn()
    made[0].output_tokens.append(BRACE)
    assert (first.done(), first.error) == (True, None)
    assert [message.tokens for batch in silent.process.made[1].batches for message in batch.follow] == [[BRACE]]


def test_a_grammar_is_not_blamed_for_a_process_that_the_system_has_killed_once(silent: Here) -> None:
    _, constraints = made = several(silent, "", "")
    silent.process.end(-signal.SIGKILL)  # as when the memory of the machine has run out
    for _ in made:
        silent.process.turn()
    assert [(one.error, one.done()) for one in constraints] == [(None, True)] * 2
    constraints[0].take(0, BRACE)
    silent.process.end(-signal.SIGKILL)
    assert [one.error for one in constraints] == [TOO_MUCH, None], "it was the second time"


def test_after_an_end_with_several_requests_each_is_sent_alone_and_one_fails(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    silent.process.end()
    for _ in range(2):
        silent.process.turn()
    silent.process.end()
    assert [one.error for one in constraints] == [None, None, TOO_MUCH]
    assert [len(batch.follow) for batch in silent.process.made[1].batches] == [1, 1, 1]
    for one in made[:2]:
        one.output_tokens.append(BRACE)
    assert [one.done() for one in constraints[:2]] == [True, True]


def test_requests_that_end_a_process_together_are_asked_alone_from_then_on(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    silent.process.end()
    for token in (BRACE, BRACE):
        for one in made:
            silent.process.turn()
            one.output_tokens.append(token)
    assert [one.error for one in constraints] == [None] * 3
    assert {len(batch.follow) for batch in silent.process.made[1].batches} == {1}


def test_a_request_is_not_blamed_for_one_that_has_ended_meanwhile(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    del made[:2], constraints[:2]  # their clients have left, and a token of theirs ends the process
    silent.process.end()
    silent.process.turn()
    assert constraints[0].error is None


@pytest.mark.parametrize("answer", [None, b"\xff\xff\xff\xff nonsense", b"\0\0\0\1\xff"])
def test_a_process_that_does_not_answer_or_writes_nonsense_is_replaced(silent: Here, answer: bytes | None) -> None:
    _, (constraint,) = made = several(silent, "")
    silent.process.poll()
    for _ in range(KILLS):
        assert (len(made), constraint.error) == (2, None)
        silent.process.poll()
        if answer is None:
            silent.process.now += SILENT + 1
        else:
            silent.process.made[-1].connection.sendall(answer)
        silent.process.poll()
    assert constraint.error == TOO_MUCH


@pytest.mark.parametrize("fault", ["no descriptor", "it ends", "it is stopped"])
def test_a_process_that_cannot_be_started_is_the_fault_of_no_request(
    silent: Here, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> tuple["subprocess.Popen[bytes]", socket.socket]:
        raise OSError(24, "Too many open files")

    silent.process.begins = False
    with monkeypatch.context() as patch:
        if fault == "no descriptor":
            patch.setattr(silent.process, "_start", start)
        _, (constraint,) = made = several(silent, "")
        for _ in range(STARTS):
            assert constraint.error is None
            silent.process.poll()
            if fault != "no descriptor":
                silent.process.now += SILENT if fault == "it ends" else SILENT + 1  # a start may take that long
                silent.process.end() if fault == "it ends" else silent.process.poll()
    assert (len(made), constraint.error) == (2, NOT_STARTED)
    silent.process.begins = True
    _, (later,) = made = several(silent, "")
    silent.process.turn()
    assert (len(made), later.done()) == (2, True), "the next one has a process again"


def test_processor_time_is_charged_to_the_clients_of_the_batch_and_an_end_as_the_limit(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent.process, "patience", 1.0)
    scheduler = Scheduler(PagedCache(64, 4), turns=FairQueues)
    made, constraints = several(silent, *"aab")
    for one in made:
        scheduler.submit(one)
    assert isinstance(scheduler.turns, FairQueues)
    served = scheduler.turns.share.served
    before = dict(served)
    for _ in made:
        silent.process.turn()
    for constraint in constraints:
        constraint.take(0, BRACE)
    silent.process.poll()
    silent.process.made[0].send(Answers(seconds=3.0))
    silent.receive(scheduler, 0.0)
    assert [served[tenant] - before[tenant] for tenant in "ab"] == pytest.approx([2000.0, 1000.0])
    assert silent.process.patience == 0.0, "no step waits for its next masks"
    silent.process.end()
    silent.process.end()
    silent.receive(scheduler, 0.0)
    assert sum(served.values()) - sum(before.values()) == pytest.approx(1000 * (3 + 2 * COMPILING))
    assert [one.error is None for one in constraints] == [False, True, True]
    assert made[0].finish_reason is FinishReason.ERROR


def test_grammars_of_requests_that_end_while_another_is_compiled_are_never_sent(silent: Here) -> None:
    first = request("first")
    opened = constraint_of(silent, first)
    silent.process.poll()
    for number in range(50):
        constraint_of(silent, request(str(number)))
    last = request("last")
    constraint = constraint_of(silent, last)
    for _ in range(2):
        silent.process.turn()
    assert opened.done()
    assert constraint.done()
    assert sum(len(batch.follow) for batch in silent.process.made[0].batches) == 2


def test_clients_have_their_grammars_compiled_in_turns(silent: Here) -> None:
    made, constraints = several(silent, *"aa")
    silent.process.poll()
    more, others = several(silent, *"abbc")
    constraints += others
    for _ in made + more:
        silent.process.turn()
    order = [message.key for batch in silent.process.made[0].batches for message in batch.follow]
    assert [constraints[key].tenant for key in order] == [*"abcaba"]


def test_requests_that_run_have_half_of_the_time_whatever_new_grammars_come(silent: Here) -> None:
    """Each of four ends the process after two seconds."""
    running = [request(name, grammar=BRACES) for name in "abc"]
    constraints = [constraint_of(silent, one) for one in running]
    for _ in running:
        silent.process.turn()
    bad, hostile = several(silent, *"xxxx")
    for number in range(len(bad)):
        silent.process.poll()
        silent.process.now += 2.0
        silent.process.end()
        assert [one.error is None for one in hostile] == [place > number for place in range(len(bad))]
        for index in range(3 * number + 1, 3 * number + 4):  # each has three masks, though the process is a new one
            for one, constraint in zip(running, constraints, strict=True):
                one.output_tokens[:] = [BRACE] * index
                constraint.ask(index)
            silent.process.now += 0.5
            for _ in running:
                silent.process.turn()
            assert all(one.done() for one in constraints)
        silent.process.now += 0.5


def test_a_process_that_has_grown_is_replaced_and_no_request_is_blamed(silent: Here) -> None:
    made = request(grammar=BRACES)
    constraint = constraint_of(silent, made)
    silent.process.turn()
    for index in (1, 2, 3):
        made.output_tokens[:] = [BRACE] * index
        constraint.ask(index)
        silent.process.end(0)  # after its last answer, and before it has read this
    silent.process.turn()
    assert (constraint.error, constraint.done()) == (None, True)
    assert silent.process.made[-1].batches[0].follow[0].params is not None
