"""Grammars in real processes: of a server that the engine starts, which may hang, die or grow, and ends with it."""

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from phase0_request.tokenizer import BUNDLED
from phase6_integration.extras.structured import isolated_process
from phase6_integration.extras.structured.grammar_process import MEMORY
from phase6_integration.extras.structured.grammar_server import GrammarServer
from phase6_integration.extras.structured.isolated_grammars import IsolatedGrammars
from tests.phase6_integration.cities import TOKENIZER
from tests.phase6_integration.extras.structured.isolated import (
    EOS,
    POINT,
    SIZE,
    constraint_of,
    request,
    several,
)
from tests.phase6_integration.life import PATIENCE


@pytest.fixture(scope="module")
def real() -> Iterator[IsolatedGrammars]:
    with closing(IsolatedGrammars(SIZE, str(BUNDLED), EOS)) as constraints:
        yield constraints


def until(constraints: IsolatedGrammars, done: Callable[[], bool]) -> None:
    for _ in range(600):
        if done():
            return
        constraints.poll(0.1)
    raise AssertionError("it did not happen")


def test_real_processes_follow_and_end_what_takes_too_long(real: IsolatedGrammars) -> None:
    """An ambiguous grammar with masks of seconds, beside one of another client and one of the same."""
    ambiguous = "start: /[0-9]{20}/ x\nx: W | x x | x W x\nW: /[a-z]/\n"
    names = {"bad": "one", "same": "one", "other": "two"}
    made = {
        name: request(name, tenant, grammar=ambiguous if name == "bad" else POINT) for name, tenant in names.items()
    }
    bad, same, other = (constraint_of(real, one) for one in made.values())
    until(real, lambda: bad.done() and same.done() and other.done())
    made["bad"].output_tokens += TOKENIZER.encode("1" * 20, False) + TOKENIZER.encode("a", False) * 400
    until(real, bad.done)
    assert bad.error is not None
    for name in ("same", "other"):
        made[name].output_tokens += TOKENIZER.encode("{", False)
    until(real, lambda: same.done() and other.done())
    assert (same.error, other.error) == (None, None)


def test_a_server_that_was_killed_is_replaced_and_costs_no_request(real: IsolatedGrammars) -> None:
    for tenant in ("before", "after"):
        _, (constraint,) = made = several(real, tenant)
        until(real, constraint.done)
        assert (len(made), constraint.error) == (2, None)
        assert real.server._running is not None
        real.server._running[0].kill()
        real.server._running[0].wait()


def test_a_server_that_was_stopped_is_replaced_and_costs_no_request(
    real: IsolatedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (constraint,) = made = several(real, "running")
    until(real, constraint.done)
    assert real.server._running is not None
    stopped = real.server._running[0]
    stopped.send_signal(signal.SIGSTOP)
    _, (constraint,) = made = several(real, "stopped")
    real.poll(0)
    with monkeypatch.context() as patch:
        patch.setattr(isolated_process, "STALLED", -1.0)
        real.poll(0)
    until(real, constraint.done)
    assert (len(made), constraint.error, stopped.poll()) == (2, None, -signal.SIGKILL)


def test_the_server_ends_with_the_engine() -> None:
    server = GrammarServer(str(BUNDLED), SIZE, EOS)
    with server.connect() as connection:
        assert connection.recv(1 << 10), "a child has begun"
    assert server._running is not None
    process, control = server._running
    control.close()
    assert process.wait(PATIENCE) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit memory")
def test_the_memory_of_a_real_process_is_limited(real: IsolatedGrammars) -> None:
    made = request()
    constraint = constraint_of(real, made)
    until(real, constraint.done)
    assert real.server._running is not None
    pid = real.server._running[0].pid
    (child, *_) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    limits = {
        line[:25].strip(): line[25:].split()[0] for line in Path(f"/proc/{child}/limits").read_text().splitlines()
    }
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    assert 0 <= int(limits["Max address space"]) - pages * resource.getpagesize() <= MEMORY
    assert limits["Max core file size"] == "0"
