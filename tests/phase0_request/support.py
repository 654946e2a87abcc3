"""What the tests of this phase judge by, and run with."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    """Letter by letter: does what has been read end with a stop string? The longest that does."""
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
    """Run to the end, but not for ever: a test that hangs is a test that fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())
