"""A session of the load: one request, or several, each sent after the answer to the one before."""

import random
from collections.abc import Sequence
from typing import NamedTuple

FIRST, LAST = 300, 3999  # the range of prompt token ids: words in every usual vocabulary, special tokens in none


class Turn(NamedTuple):
    """One request: the part of its prompt that is new after earlier turns and answers, as token ids or as text."""

    prompt: list[int] | str
    max_tokens: int
    pause: float = 0.0  # seconds after the answer before


class Session(NamedTuple):
    """Requests, each sent after the answer to the one before. Most sessions have one."""

    time: float | None  # seconds after the start; None: as soon as concurrency permits
    turns: Sequence[Turn]


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(FIRST, LAST + 1), k=count)
