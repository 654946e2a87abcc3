"""Grammars in a real process, which may hang, die or grow, and ends with the engine."""

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.extras.grammar.constraints import Constraints
from phase2_prefill_decode.extras.grammar.masks import Masks
from phase6_integration.extras.structured import grammar_process
from phase6_integration.extras.structured.grammar_process import GrammarProcess, start_worker
from phase6_integration.extras.structured.grammar_worker import MEMORY
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

start = partial(start_worker, str(BUNDLED), SIZE, EOS)


@pytest.fixture(scope="module")
def real() -> Iterator[IsolatedGrammars]:
    grammars = IsolatedGrammars(SIZE, Masks(Constraints(SIZE, None)), GrammarProcess(start))
    with closing(grammars.process):
        yield grammars


def until(grammars: IsolatedGrammars, done: Callable[[], bool]) -> None:
    for _ in range(600):
        if done():
            return
        grammars.process.poll(0.1)
    raise AssertionError("it did not happen")


def test_a_real_process_follows_and_ends_with_what_takes_too_long(real: IsolatedGrammars) -> None:
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


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_killed_or_stopped_is_replaced_and_costs_no_request(
    real: IsolatedGrammars, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (constraint,) = made = several(real, "running")
    until(real, constraint.done)
    assert real.process._running is not None
    process, _ = real.process._running
    process.send_signal(sent)
    _, (constraint,) = made = several(real, "waiting")
    real.process.poll()
    if sent is signal.SIGSTOP:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_process, "SILENT", -1.0)
            real.process.poll()
    until(real, constraint.done)
    assert (len(made), constraint.error, process.returncode) == (2, None, -signal.SIGKILL)


def test_the_process_ends_with_the_engine() -> None:
    process, connection = start()
    assert connection.recv(1 << 10), "it has begun"
    connection.close()
    assert process.wait(PATIENCE) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit memory")
def test_the_memory_of_a_real_process_is_limited(real: IsolatedGrammars) -> None:
    made = request()
    constraint = constraint_of(real, made)
    until(real, constraint.done)
    assert real.process._running is not None
    process = Path(f"/proc/{real.process._running[0].pid}")
    limits = {line[:25].strip(): line[25:].split()[0] for line in (process / "limits").read_text().splitlines()}
    mapped = int((process / "statm").read_text().split()[0]) * resource.getpagesize()
    assert MEMORY // 2 <= int(limits["Max address space"]) - mapped <= MEMORY
    assert limits["Max core file size"] == "0"
