"""Traces: streams of arrivals with their prompts and the lengths of their answers. The same seed gives the same trace.

A trace is generated as it is read: a million requests take no more memory than one. A prompt begins with tokens that
make it unique, or with those of an earlier prompt; the rest is filling. An answer is filling that ends in EOS, at a
length that only the trace knows.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import check_choice, check_int, check_number

EOS, WORD = 0, 1
LONGEST = 1 << 20  # tokens of a prompt or an answer
_FIRST = 2  # of the tokens that make prompts unique


class Arrival(NamedTuple):
    """A request, and the length of its answer, which the engine does not know."""

    time: float  # seconds
    prompt: tuple[int, ...]
    answer: int  # tokens, the EOS among them
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrivals of one kind, with long-tail lengths: log-normal, given by their medians and one spread.

    A spread of 1 makes one length in six 2.7 times the median or more, and one in a hundred ten times.
    """

    kind: str = "poisson"
    requests: int = 1000
    rate: float = 8.0  # requests a second, on average
    prompt: int = 128  # tokens, the median; of a chat, of a question
    answer: int = 48  # tokens, the median
    spread: float = 1.0  # of the logarithm of a length
    max_prompt: int = 2048  # longer ones are cut
    max_answer: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_int("requests", self.requests, 1)
        for name in ("prompt", "answer", "max_prompt", "max_answer"):
            check_int(name.replace("_", "-"), getattr(self, name), 1, LONGEST)
        check_number("spread", self.spread, 0)
        check_number("rate", self.rate, 0, above=True)

    def arrivals(self) -> Iterator[Arrival]:
        """The arrivals in the order of time."""
        return KINDS[self.kind](self)

    def answer_length(self, rng: random.Random) -> int:
        return self._length(rng, self.answer, self.max_answer)

    def prompt_length(self, rng: random.Random) -> int:
        return self._length(rng, self.prompt, self.max_prompt)

    def _length(self, rng: random.Random, median: int, most: int) -> int:
        logarithm = rng.normalvariate(math.log(median), self.spread)
        return most if logarithm >= math.log(most) else max(round(math.exp(logarithm)), 1)


def request(number: int, arrival: Arrival, max_tokens: int) -> Request:
    """Make the request of an arrival. Of its answer it has only a limit, not the length."""
    params = SamplingParams(max_tokens=max_tokens)
    return Request(f"r{number}", arrival.prompt, params, arrival.priority, arrival.time, tenant=arrival.tenant)


# region poisson
def poisson(trace: Trace) -> Iterator[Arrival]:
    """Independent arrivals: the time between two of them is exponential."""
    rng, now = random.Random(trace.seed), 0.0
    for number in range(trace.requests):
        now += rng.expovariate(trace.rate)
        yield _lone(trace, number, now, rng)


# endregion


def bursty(trace: Trace) -> Iterator[Arrival]:
    """Calms and bursts in turns, ten seconds each on average; the rate of a burst is nine times the rate of a calm."""
    rng, now, number = random.Random(trace.seed), 0.0, 0
    burst, turn = False, rng.expovariate(0.1)
    while number < trace.requests:
        gap = rng.expovariate(trace.rate * (1.8 if burst else 0.2))
        if now + gap >= turn:  # an exponential wait has no memory, so it may start afresh here
            now, burst = turn, not burst
            turn = now + rng.expovariate(0.1)
            continue
        now += gap
        yield _lone(trace, number, now, rng)
        number += 1


def batch(trace: Trace) -> Iterator[Arrival]:
    """All requests arrive at the start."""
    rng = random.Random(trace.seed)
    return (_lone(trace, number, 0.0, rng) for number in range(trace.requests))


def _lone(trace: Trace, number: int, now: float, rng: random.Random) -> Arrival:
    length = trace.prompt_length(rng)
    prompt = (_FIRST + number, *(WORD,) * (length - 1))
    return Arrival(now, prompt, trace.answer_length(rng), rng.choice((-1, 0, 0, 1)))


INSTRUCTIONS, INSTRUCTION = 4, 256  # different ones, and the tokens of each
TURNS = 5  # of a conversation, on average
PAUSE = 20.0  # seconds from one question to the next, on average
_MOST_RATE = 1e9  # a second: limits the number of users


def chat(trace: Trace) -> Iterator[Arrival]:
    """Conversations of this many users, each of whom asks a question every PAUSE seconds on average, answered or not.

    A conversation begins with one of a few instructions, and each turn repeats all questions and answers before it. It
    ends after some turns, or when the next prompt would be too long, and then its user begins another. So the rate is
    the same from the first second on; the first questions begin new conversations.
    """
    rng, now, begun = random.Random(trace.seed), 0.0, 0
    users = math.ceil(min(trace.rate, _MOST_RATE) * PAUSE)
    going: dict[int, tuple[tuple[int, ...], int]] = {}  # by user: the conversation so far, and the turns left
    for count in range(trace.requests):
        now += rng.expovariate(trace.rate)
        user = rng.randrange(users)
        history, left = going.pop(user, ((), 0))
        if not left:
            history = (_FIRST + begun % INSTRUCTIONS, *(WORD,) * (INSTRUCTION - 1))
            left = rng.randint(1, 2 * TURNS - 1)
            begun += 1
        question = (_FIRST + INSTRUCTIONS + count, *(WORD,) * (trace.prompt_length(rng) - 1))
        prompt = (history + question)[: INSTRUCTION + trace.max_prompt]
        answer = trace.answer_length(rng)
        yield Arrival(now, prompt, answer)
        if left > 1 and len(prompt) + answer < trace.max_prompt:
            going[user] = (*prompt, *(WORD,) * (answer - 1), EOS), left - 1


DOCUMENTS, DOCUMENT = 48, 1536  # different ones, and the tokens of each


def documents(trace: Trace) -> Iterator[Arrival]:
    """Questions about a few long documents: each prompt is one of them, and then a question of its own."""
    rng, now = random.Random(trace.seed), 0.0
    for number in range(trace.requests):
        now += rng.expovariate(trace.rate)
        document = (_FIRST + rng.randrange(DOCUMENTS), *(WORD,) * (DOCUMENT - 1))
        question = (_FIRST + DOCUMENTS + number, *(WORD,) * (trace.prompt_length(rng) - 1))
        yield Arrival(now, document + question, trace.answer_length(rng))


KINDS: dict[str, Callable[[Trace], Iterator[Arrival]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "chat": chat,
    "documents": documents,
    "batch": batch,
}


# A file of arrivals: [{"time": 0.5, "prompt": 120, "answer": 40}, ...]; prompt is a length, or a list of tokens.


def load(path: str | Path) -> list[Arrival]:
    """Read arrivals from a JSON file, in the order of time. ValueError names the first bad entry."""
    entries = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{Path(path).name} must hold a list of arrivals, at least one")
    return sorted((_arrival(number, entry) for number, entry in enumerate(entries)), key=lambda arrival: arrival.time)


def _arrival(number: int, entry: Any) -> Arrival:
    try:
        time, prompt, answer = float(entry["time"]), entry["prompt"], entry["answer"]
        if type(prompt) is int and 1 <= prompt <= LONGEST:
            prompt = [_FIRST + number, *[WORD] * (prompt - 1)]
        if not 0 <= time < math.inf or type(answer) is not int or not 1 <= answer <= LONGEST:
            raise ValueError
        if not set(entry) <= set(Arrival._fields):
            raise ValueError
        request = Request("", tuple(prompt), priority=entry.get("priority", 0), tenant=entry.get("tenant", ""))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        example = '{"time": 0.5, "prompt": 120, "answer": 40}'
        raise ValueError(
            f"arrival {number} must be an object such as {example}: seconds, then tokens from 1 to {LONGEST:,}, or "
            f"token ids of the prompt; with a priority and a tenant if you like; got {entry!r:.80}"
        ) from error
    return Arrival(time, request.prompt_tokens, answer, request.priority, request.tenant)
