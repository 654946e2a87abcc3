"""Workload: the prompts of a run, their arrival times and output lengths."""

import math
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from phase0_request.checks import ConfigError, check_choice, check_number
from phase5_continuous.lab.traces import Trace
from phase6_integration.engine.options import at_least, check_fields, option

KINDS = {
    "fixed": "every prompt and every answer is of one length",
    "long-tail": "lengths are log-normal, around the lengths given as medians",
    "shared-prefix": "fixed lengths, each prompt after one of a few prefixes",
}
FIRST, LAST = 300, 3999  # the range of prompt token ids: words in every usual vocabulary, special tokens in none


class Work(NamedTuple):
    """One request to be sent."""

    time: float  # seconds after the start; 0: as soon as concurrency permits
    prompt: list[int]
    max_tokens: int


def _kind(_: str, value: str) -> None:
    check_choice("workload", value, tuple(KINDS))


def _new_seed() -> int:
    return secrets.randbelow(1 << 31)


def _rate(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, or inf for all at once, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and their arrival times. Lengths are in tokens. With a request rate arrivals are Poisson; without one all
    requests arrive at the start. The same seed gives the same workload, and a server may have kept its prefixes: a seed
    that is not given is a new one."""

    kind: str = option("fixed", ", ".join(KINDS), "KIND", _kind, ("--workload",))
    num_prompts: int = option(200, "requests", check=at_least(1))
    request_rate: float = option(math.inf, "mean requests/s, Poisson arrivals; inf: all at once", "RATE", _rate)
    input_len: int = option(128, "prompt tokens; the median for long-tail", check=at_least(1))
    output_len: int = option(64, "output tokens; the median for long-tail", check=at_least(1))
    spread: float = option(1.0, "long-tail: sigma of the log-normal lengths", "SIGMA", partial(check_number, low=0))
    max_input_len: int = option(1024, "long-tail: longer prompts are cut", check=at_least(1))
    max_output_len: int = option(512, "long-tail: longer outputs are cut", check=at_least(1))
    prefix_len: int = option(256, "shared-prefix: tokens before each prompt", check=at_least(0))
    num_prefixes: int = option(4, "shared-prefix: number of different prefixes", check=at_least(1))
    seed: int = option(_new_seed, "of times, lengths and prompts (a new one for each run, which is printed)")

    def __post_init__(self) -> None:
        check_fields(self)

    def works(self) -> Iterator[Work]:
        """The requests in the order of their times."""
        rng = random.Random(self.seed)
        prefixes: list[list[int]] = [[]]
        if self.kind == "shared-prefix":
            prefixes = [_tokens(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        for index, arrival in enumerate(self._trace().arrivals()):
            prompt = prefixes[index % len(prefixes)] + _tokens(rng, len(arrival.prompt))
            yield Work(arrival.time, prompt, arrival.answer)

    def _trace(self) -> Trace:
        """Times and lengths are those of phase 5's traces. Fixed lengths are a long tail without spread."""
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
