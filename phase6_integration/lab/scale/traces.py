# mypy: allow-untyped-defs
"""Traces of millions of requests, as rows of numbers: conversations behind shared prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phase2_prefill_decode.extras.cpu.intrinsics import kernel
from phase5_continuous.lab.traces import EOS, PAUSE, WORD, Arrival

LONGEST_PROMPT, LONGEST_ANSWER = 4096, 512
FIRST, QUESTIONS = 2, 1_000_000  # tokens that no two prefixes, and no two questions, begin with
NONE = -1  # no conversation, no prefix


def row(**names: str) -> np.dtype[np.void]:
    return np.dtype([(name, kind) for kind, columns in names.items() for name in columns.split()])


# Of a request: its trace, the tokens to compute and those in the step that runs, the tokens cached and those that the
# router expected, the pages it took, where its cache entry is, and the request behind it in its list.
REQUEST = row(
    f8="time", i4="conversation prefix prompt answer left chunk hit expected pages entry next", f4="ttft tpot"
)


@kernel
def make(seed, rate, users, chances, shared, question, answer, turns, requests):
    """Fill a trace. Users ask in random turns. A conversation has `turns` on average, begins with a prefix drawn by its
    chance (`chances` are their running sums), and each prompt repeats all that was said before."""
    np.random.seed(seed)
    going, left = np.full(users, NONE), np.zeros(users, np.int64)
    kind, said = np.full(users, NONE), np.zeros(users, np.int64)
    now, begun = 0.0, 0
    for i in range(len(requests)):
        now += np.random.exponential(1 / rate)
        user = np.random.randint(users)
        if left[user] == 0:
            going[user], begun, left[user], said[user] = begun, begun + 1, np.random.randint(1, 2 * turns), 0
            if len(chances):
                kind[user], said[user] = np.searchsorted(chances, np.random.random()), shared
        q, asked = requests[i], max(1, round(np.random.lognormal(np.log(question), 1.0)))
        q.time, q.conversation, q.prefix = now, going[user], kind[user]
        q.prompt = min(said[user] + asked, shared + LONGEST_PROMPT)
        q.answer = min(max(1, round(np.random.lognormal(np.log(answer), 1.0))), LONGEST_ANSWER)
        said[user] = q.prompt + q.answer
        left[user] = left[user] - 1 if said[user] < LONGEST_PROMPT else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What requests have in common. Lengths are log-normal, given by their medians."""

    prefixes: int = 0  # different ones
    zipf: float = 0.0  # the n-th is drawn n ** zipf times as seldom as the first
    shared: int = 0  # tokens of each
    question: int = 256
    answer: int = 128
    turns: int = 1  # of a conversation, on average

    def rows(self, requests: int, rate: float, seed: int = 0) -> Any:
        """A trace, with `rate` requests a second."""
        weights = np.arange(1.0, self.prefixes + 1) ** -self.zipf
        users = max(round(rate * PAUSE), 1) if self.turns > 1 else 1
        made = np.zeros(requests, REQUEST).view(np.recarray)
        chances = np.cumsum(weights / weights.sum())
        make(seed, rate, users, chances, self.shared, self.question, self.answer, self.turns, made)
        return made


KINDS = {
    "conversations": Kind(prefixes=4, shared=256, turns=5),
    "shared_prompts": Kind(prefixes=2000, zipf=1.0, shared=1024, question=128, answer=64),
    "tenants": Kind(prefixes=500, zipf=1.2, shared=512, turns=5),
    "nothing_shared": Kind(question=512),
}


def arrivals(rows: Any, shared: int) -> Iterator[Arrival]:
    """A trace as phase 5's simulator wants it: with tokens."""
    said: dict[int, tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        prefix = (FIRST + row.prefix, *(WORD,) * (shared - 1)) if row.prefix >= 0 else ()
        before = said.get(row.conversation, prefix)
        prompt = (*before, QUESTIONS + number, *(WORD,) * (row.prompt - len(before) - 1))
        said[row.conversation] = (*prompt, *(WORD,) * (row.answer - 1), EOS)
        yield Arrival(float(row.time), tuple(map(int, prompt)), int(row.answer))
