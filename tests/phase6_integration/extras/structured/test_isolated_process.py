"""Processes that follow grammars: the engine outlives all that a grammar may do to them, and clients share them."""

import socket

import pytest

from phase0_request import FinishReason
from phase1_kv_pool import PagedCache
from phase5_continuous import Scheduler
from phase5_continuous.extras.fairness import FairQueues
from phase6_integration.extras.structured import isolated_grammars, isolated_process
from phase6_integration.extras.structured.grammar_process import COMPILING, Answers
from phase6_integration.extras.structured.isolated_process import DEATHS, FAILED_STARTS, STALLED
from tests.phase6_integration.extras.structured.isolated import (
    BRACE,
    Here,
    constraint_of,
    request,
    several,
    three_that_draw_together,
)


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
    for _ in range(DEATHS):
        silent.die()  # with the second one's grammar
    assert (first.error, second.error) == (None, isolated_process.TOO_MUCH)
    first.take(0, BRACE)
    silent.turn()
    assert first.done() or first.error is None
    assert [message.tokens for batch in silent.made[DEATHS].batches for message in batch.follow] == [[BRACE]]


def test_a_grammar_is_not_blamed_for_a_process_that_the_system_has_killed(silent: Here) -> None:
    _, (constraint,) = made = several(silent, "")
    silent.die()  # as when the memory of the machine has run out
    silent.turn()
    assert (len(made), constraint.error, constraint.done()) == (2, None, True)


def test_after_a_death_with_several_requests_each_is_sent_alone_and_one_fails(silent: Here) -> None:
    made, constraints = three_that_draw_together(silent)
    silent.die()
    for _ in range(2):
        silent.turn()
    for _ in range(DEATHS):
        silent.die()
    assert [one.error for one in constraints] == [None, None, isolated_process.TOO_MUCH]
    assert [len(batch.follow) for process in silent.made[1:3] for batch in process.batches] == [1, 1, 1, 1]
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
    for _ in range(DEATHS):
        assert constraint.error is None
        silent.poll()
        if answer is not None:
            silent.made[-1].connection.sendall(answer)
        with monkeypatch.context() as patch:
            patch.setattr(isolated_process, "STALLED", STALLED if answer else -1.0)
            silent.poll()
    assert constraint.error == isolated_process.TOO_MUCH


def test_a_server_may_take_longer_to_start_than_to_answer_and_then_its_requests_fail(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: one that needs half a minute was killed and started again, for ever."""
    silent.begins = False
    _, (constraint,) = made = several(silent, "")
    silent.poll()
    with monkeypatch.context() as patch:
        patch.setattr(silent, "close", lambda: None)  # which ends the server
        patch.setattr(isolated_process, "STALLED", -1.0)
        for _ in range(2 * FAILED_STARTS):
            silent.poll()
        assert (len(made), len(silent.made), constraint.error) == (2, 1, None)
        patch.setattr(isolated_process, "STARTING", -1.0)
        for _ in range(2 * FAILED_STARTS):  # it is given up, and another is started
            silent.poll()
    assert (len(silent.made), constraint.error) == (FAILED_STARTS, isolated_process.NOT_STARTED)


def test_processor_time_is_charged_to_the_clients_that_have_requests_and_a_death_as_the_limit(
    silent: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammars, "PROCESSES", 1)
    monkeypatch.setattr(isolated_process, "PATIENCE", 1.0)
    scheduler = Scheduler(PagedCache(64, 4), turns=FairQueues)
    made, constraints = several(silent, *"aab")
    for one in made:
        scheduler.submit(one)
    assert isinstance(scheduler.turns, FairQueues)
    served = scheduler.turns.share.served
    before = dict(served)
    silent.poll()
    silent.made[0].send(Answers(seconds=3.0))
    silent.receive(scheduler, 0.0)
    assert [served[tenant] - before[tenant] for tenant in "ab"] == pytest.approx([2000.0, 1000.0])
    assert [process.patience for process in silent._processes.values()] == [0.0], "no step waits for its next masks"
    for _ in range(DEATHS):
        silent.die()
    silent.receive(scheduler, 0.0)
    assert sum(served.values()) - sum(before.values()) == pytest.approx(1000 * (3 + DEATHS * COMPILING))
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
