"""Oracles and helpers of this phase's tests."""

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def refused(error: type[Exception], words: str, call: Callable[..., object], *given: Any) -> None:
    """A call must raise this error, with these words in its message. A failure says which call and what it did."""
    said = f"{getattr(call, '__name__', call)}({', '.join(str(getattr(each, 'id', each)) for each in given)})"
    try:
        call(*given)
    except error as raised:
        message = str(raised)
    else:
        pytest.fail(f"{said} must raise {error.__name__} with '{words}', and it raises nothing")
    assert re.search(words, message), f"{said} raises '{message}', which must have '{words}' in it"


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    """The text before its first stop string, found by trying every position. Of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def run(coroutine: Coroutine[None, None, T]) -> T:
    """Run a coroutine with a time limit, so that a test that hangs fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())
