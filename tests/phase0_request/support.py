"""Oracles and helpers of this phase's tests."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


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
