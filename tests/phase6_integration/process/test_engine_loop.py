"""The loop of the engine process: when it waits for messages, what it does with them, and what it reports of steps."""

from typing import Any

import pytest

from phase0_request import FinishReason, SamplingParams
from phase0_request.core import EngineCore
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.loop_hooks import LoopHooks, Send
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.engine_process import Loop
from phase6_integration.process.messages import (
    EngineRequest,
    Finish,
    LoadModel,
    Ping,
    Pong,
    SideMessage,
)
from tests.phase6_integration.scripted_loop import Compiled, Line, ask, idle_loop, progress, run, updates


def tokens(line: Line, id: str) -> list[int]:
    return [new.token for new in progress(line) if new.id == f"{id}-0" and new.token is not None]


def ends(line: Line) -> dict[str, FinishReason]:
    ended = [(new.id, new.finish_reason) for new in progress(line) if new.finish_reason is not None]
    assert len(dict(ended)) == len(ended), f"a request has ended twice: {ended}"
    return {id.removesuffix("-0"): reason for id, reason in ended}


def admitted(line: Line) -> list[tuple[str, float, int]]:
    return [(new.id, new.admitted, new.cached) for new in progress(line) if new.admitted is not None]


def test_each_step_is_reported_in_one_message_and_each_token_once() -> None:
    loop, line = run([ask("a", max_tokens=3), ask("b", max_tokens=2)])
    got = tokens(line, "a"), tokens(line, "b")
    assert got == ([100, 101, 102], [100, 101]), f"a has 3 tokens and b has 2; reported were {got}"
    assert ends(line) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    sent = updates(line)
    assert len(sent) == 3, f"three steps make three updates; {len(sent)} were sent"
    first, second, third = sent
    ids = [[new.id for new in update.progress if new.token is not None] for update in (first, second, third)]
    assert ids == [["a-0", "b-0"], ["a-0", "b-0"], ["a-0"]], "the token that ends a request is reported too"
    assert (first.prefill_tokens, first.decode_tokens, second.prefill_tokens, second.decode_tokens) == (6, 0, 0, 2)
    assert [new.finish_reason for new in second.progress] == [None, FinishReason.LENGTH]
    assert (first.gauges.running, third.gauges.running, third.gauges.pages_used) == (2, 0, 0)
    assert line.waited == 2, "it waits for the first message, and again when both requests have ended"
    assert not loop._requests, f"requests that have ended are still known: {[*loop._requests]}"


def test_a_request_is_announced_once_in_the_step_that_admits_it_with_its_cached_tokens() -> None:
    _, line = run([ask("a", prompt=9)], [ask("b", prompt=9, arrival=0.5)])
    assert admitted(line) == [("a-0", 1.0, 0), ("b-0", 1.0, 8)], "two full pages of b are cached"
    first, second, *_ = updates(line)
    assert (first.progress[0].admitted, second.progress[0].admitted) == (1.0, 1.0), "ahead of its first token"


def test_messages_are_read_between_two_steps() -> None:
    finish = Finish("a-0", FinishReason.STOP)
    _, line = run([ask("a", max_tokens=20)], [Ping()], [], [finish, Finish("unknown-0", FinishReason.ABORT)], [finish])
    assert ends(line) == {"a": FinishReason.STOP}, "a Finish ends the request that it names; an unknown id is ignored"
    assert tokens(line, "a") == [100, 101, 102], "three steps were run before the message came"
    assert line.sent.index(Pong()) == 1, "a ping is answered after the first step, not at the end"


def test_a_request_that_the_engine_refuses_ends_at_once_and_leaves_nothing() -> None:
    loop, line = run([ask("large", prompt=40)], [ask("a", max_tokens=1)])
    refused, served = updates(line)
    (ended,) = refused.progress
    assert (ended.id, ended.finish_reason, ended.token) == ("large-0", FinishReason.ERROR, None)
    assert "can never be served: its prompt has 40 tokens" in str(ended.error)
    assert (refused.at, refused.seconds) == (1.0, 0.0), "the time of a refusal is that of the core's clock"
    assert {new.id for new in served.progress} == {"a-0"}
    assert not loop._requests


def test_a_deadline_is_that_of_the_request_and_one_that_was_never_admitted_is_not_announced() -> None:
    loop, line = run([ask("late", timeout=5.0), ask("patient", timeout=50.0, max_tokens=1), ask("free")], now=10.0)
    assert ends(line) == {"late": FinishReason.TIMEOUT, "patient": FinishReason.LENGTH, "free": FinishReason.LENGTH}
    assert [id for id, *_ in admitted(line)] == ["patient-0", "free-0"]
    assert not loop._unannounced, f"ended requests are still to be announced: {[*loop._unannounced]}"


def test_an_engine_is_loaded_once() -> None:
    with pytest.raises(ValueError, match="an engine can be loaded only once"):
        idle_loop()[0].handle(LoadModel(EngineOptions(), "a:b"))


def test_an_extra_is_called_around_each_step_and_gets_its_own_messages_only() -> None:
    seen: list[object] = []

    def extra(core: EngineCore[Scheduler, Any], send: Send) -> LoopHooks:
        return LoopHooks(
            name="echo",
            before_step=lambda: seen.append(core.steps),
            no_step=lambda: seen.append("idle"),
            received=lambda body: send("echo", body.upper()),
        )

    loop, line = idle_loop(extras=[extra, lambda *_: LoopHooks()])
    for message in (SideMessage("echo", b"a"), SideMessage("unknown", b"b"), ask("a", max_tokens=1)):
        loop.handle(message)
    loop.turn()
    loop.turn()
    assert [message for message in line.sent if isinstance(message, SideMessage)] == [SideMessage("echo", b"A")]
    assert seen == [0, 1, "idle"], (
        f"before_step, before_step after one step, no_step without a step; called were {seen}"
    )


# Requests that wait for their grammars, and what is done for these beside the steps.


def bound(id: str, **more: Any) -> EngineRequest:
    return EngineRequest(id, [(5, 6, 7)], SamplingParams(max_tokens=3, grammar="g"), [3], **more)


def with_grammars() -> tuple[Loop, Line, Compiled]:
    grammars = Compiled()
    loop, line = idle_loop(grammars, extras=[grammars.hooks])
    return loop, line, grammars


def test_a_request_waits_for_its_grammar_and_the_others_go_on() -> None:
    loop, line, grammars = with_grammars()
    for message in (bound("a"), ask("b", max_tokens=9)):
        loop.handle(message)
    assert grammars.prepared == ["a-0"], "it is compiled while the prompt is computed"
    for _ in range(4):
        loop.turn()
    got = len(tokens(line, "a")), len(tokens(line, "b"))
    assert got == (0, 4), f"a waits for its grammar while b runs 4 steps; a and b have {got} tokens"
    grammars.ready = True
    loop.turn()
    assert (tokens(line, "a"), len(tokens(line, "b"))) == ([100], 5)


def test_a_request_can_be_ended_while_its_grammar_is_compiled() -> None:
    loop, line, _ = with_grammars()
    loop.handle(bound("a"))
    loop.turn()
    loop.handle(Finish("a-0", FinishReason.ABORT))
    loop.turn()
    assert ends(line) == {"a": FinishReason.ABORT}
    assert not loop.core.has_work, "the only request was aborted, and there is still work"


def test_an_engine_in_which_all_wait_for_grammars_sleeps() -> None:
    loop, line, grammars = with_grammars()
    line.arrivals.extend([[bound("a")], [], []])
    with pytest.raises(EOFError):
        loop.run()
    assert line.waited == 3, "for the first message, and in each turn after the one that computed the prompt"
    assert tokens(line, "a") == []
    grammars.ready = True
    loop.turn()
    assert tokens(line, "a") == [100]


def test_an_answer_that_arrives_between_two_turns_is_seen_before_the_engine_sleeps() -> None:
    loop, line, grammars = with_grammars()
    loop.handle(bound("a"))
    loop.turn()
    grammars.arrives = True
    loop.turn()
    assert tokens(line, "a") == [100], "nothing else would wake it"
