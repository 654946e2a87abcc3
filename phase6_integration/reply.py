"""What was asked together, and what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from phase6_integration.answers import Answer, AnswerState, Delta


class Reply:
    """The answers to what was asked together. Iterating yields lists of deltas: all that has come since the last turn.
    Who reads slowly gets more at a time, and what waits for them is bounded by the answers themselves."""

    def __init__(self, answers: Sequence[Answer], let_go: Callable[[Sequence[Answer]], None]) -> None:
        self._let_go = let_go  # of answers that nobody reads
        self._answers = answers
        self._deltas: list[Delta] = []
        self._left = len(answers)  # whose last delta has not come
        self._news = asyncio.Event()
        self._admitted = asyncio.Event()

    @property
    def answers(self) -> list[AnswerState]:
        return [answer.state for answer in self._answers]

    async def admitted(self) -> None:
        """Returns when the first of the asks has been given room, or has ended."""
        await self._admitted.wait()

    def abort(self) -> None:
        """End all that has not ended; nobody reads on. May be called again, and after the end."""
        self._let_go(self._answers)

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while self._left or self._deltas:
            # region exercise 6.5
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = self._deltas, []
            # endregion
            if deltas:
                yield deltas

    def admit(self) -> None:
        self._admitted.set()

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._left -= delta.finish_reason is not None
        self._news.set()
        self._admitted.set()
