"""Workload: which prompts come when, and how long their answers will be. The same for the same seed."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phase5_continuous.lab.traces import Trace

KINDS = {
    "fixed": "every prompt and every answer is of one length",
    "long-tail": "lengths are log-normal, around the lengths given as medians",
    "shared-prefix": "fixed lengths, each prompt after one of a few prefixes",
}
FIRST, LAST = 300, 3999  # of the token ids drawn: words in every usual vocabulary, special in none


class Work(NamedTuple):
    """One request to be made."""

    time: float  # seconds after the start; 0 if it may come as soon as there is room
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths in tokens. With a rate requests come whenever they like, so many a second on average; without one, all
    are there at the start."""

    kind: str = "fixed"
    num_prompts: int = 200
    request_rate: float = math.inf
    input_len: int = 128
    output_len: int = 64
    spread: float = 1.0  # long-tail: of the logarithm of a length
    max_input_len: int = 1024  # long-tail: longer ones are cut
    max_output_len: int = 512
    prefix_len: int = 256  # shared-prefix: comes on top of the input length
    num_prefixes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a workload is one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("num_prompts", "input_len", "output_len", "max_input_len", "max_output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.prefix_len < 0:
            raise ValueError(f"prefix-len must be at least 0, got {self.prefix_len}")
        if not self.request_rate > 0:
            raise ValueError(f"request-rate must be above 0, or inf for all at once, got {self.request_rate}")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread must be at least 0 and finite, got {self.spread}")

    def works(self) -> Iterator[Work]:
        """In the order of time."""
        rng = random.Random(self.seed)
        prefixes: list[list[int]] = [[]]
        if self.kind == "shared-prefix":
            prefixes = [_tokens(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        for number, arrival in enumerate(self._trace().arrivals()):
            prompt = prefixes[number % len(prefixes)] + _tokens(rng, len(arrival.prompt))
            yield Work(arrival.time, prompt, arrival.answer)

    def _trace(self) -> Trace:
        """Phase 5's, for its times and lengths. Fixed lengths are a tail without spread."""
        tail = self.kind == "long-tail"
        together = math.isinf(self.request_rate)
        return Trace(
            kind="batch" if together else "poisson",
            requests=self.num_prompts,
            rate=1.0 if together else self.request_rate,
            prompt=self.input_len,
            answer=self.output_len,
            spread=self.spread if tail else 0.0,
            max_prompt=self.max_input_len if tail else self.input_len,
            max_answer=self.max_output_len if tail else self.output_len,
            seed=self.seed,
        )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(FIRST, LAST + 1), k=count)
