"""Calls in threads, interrupted at any moment."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phase6_integration.server.interruptible import Interruptible
from tests.phase6_integration.life import PATIENCE


def test_a_call_that_is_not_interrupted_is_a_call() -> None:
    assert Interruptible(lambda: 5)() == 5
    with pytest.raises(KeyError, match="seven"):
        Interruptible(lambda: {}["seven"])()


def test_a_call_that_catches_all_errors_ends_too() -> None:
    begun = threading.Event()

    def call() -> None:
        while True:
            try:
                begun.set()
            except Exception:
                continue

    with ThreadPoolExecutor(1) as thread:
        interruptible = Interruptible(call)
        done = thread.submit(interruptible)
        assert begun.wait(PATIENCE)
        interruptible.interrupt()
        with pytest.raises(TimeoutError):
            done.result(PATIENCE)


def test_a_call_that_has_not_begun_never_does() -> None:
    called: list[int] = []
    interruptible = Interruptible(lambda: called.append(1))
    interruptible.interrupt()
    with pytest.raises(TimeoutError):
        interruptible()
    assert called == []


def test_whenever_it_comes_it_hits_that_call_or_nothing() -> None:
    """A thread that serves one call after another is interrupted in the middle, at the end and after it."""
    chance, turns, outcomes = random.Random(0), 0, set()
    with ThreadPoolExecutor(1) as thread:
        while turns < 500 or len(outcomes) < 2:
            turns += 1
            length, until = chance.randrange(3000), chance.randrange(3000)
            interruptible = Interruptible(lambda length=length: sum(n for n in range(length)))
            done = thread.submit(interruptible)
            sum(n for n in range(until))
            interruptible.interrupt()
            try:
                assert done.result(PATIENCE) == length * (length - 1) // 2
                outcomes.add("done")
            except TimeoutError:
                outcomes.add("interrupted")
            assert thread.submit(lambda: 5).result(PATIENCE) == 5
