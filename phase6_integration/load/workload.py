"""Workload: the sessions of a run, each with its start, its prompts and the lengths of its answers."""

import math
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice

from phase0_request.support.checks import ConfigError, check_number
from phase0_request.support.options import at_least, check_fields, option, positive, text
from phase5_continuous.lab.traces import Trace
from phase6_integration.load.session import Session, Turn, tokens
from phase6_integration.load.trace_file import read

DEFAULT = 200  # sessions


def _new_seed() -> int:
    return secrets.randbelow(1 << 31)


def _rate(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, or inf for all at once, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions, drawn or read from a file. Lengths are in tokens. With a request rate sessions arrive at random, in an
    open loop; without one, and without times in a file, all are there at the start. The same seed gives the same
    workload, and a server may have kept its prefixes: a seed that is not given is a new one."""

    trace: str | None = option(
        None,
        "requests of a file: Mooncake's JSONL, or JSON of conversations as ShareGPT's (none)",
        "FILE",
        text("a file"),
    )
    num_prompts: int | None = option(
        None, f"requests; with --turns or conversations, sessions ({DEFAULT}, or the whole trace)", check=at_least(1)
    )
    request_rate: float = option(math.inf, "mean arrivals/s; inf: those of the trace, else all at once", "RATE", _rate)
    burstiness: float = option(
        1.0,
        "arrivals: 1 is Poisson, less is in bursts, more is even; the shape of a gamma distribution",
        "SHAPE",
        positive,
    )
    input_len: int = option(128, "prompt tokens; the median if there is a spread", check=at_least(1))
    output_len: int = option(64, "output tokens; the median if there is a spread", check=at_least(1))
    spread: float = option(0.0, "sigma of log-normal lengths; 0: all are alike", "SIGMA", partial(check_number, low=0))
    max_input_len: int = option(1024, "longer prompts of a spread are cut", check=at_least(1))
    max_output_len: int = option(512, "longer outputs of a spread are cut", check=at_least(1))
    prefix_len: int = option(0, "tokens before each prompt that others share", check=at_least(0))
    num_prefixes: int = option(4, "number of different prefixes", check=at_least(1))
    turns: int = option(1, "requests of a session, each with all that was said before", check=at_least(1))
    pause: float = option(
        0.0, "mean seconds, exponential, from an answer to the next turn", "SECONDS", partial(check_number, low=0)
    )
    seed: int = option(_new_seed, "of times, lengths and prompts (a new one for each run, which is printed)")

    def __post_init__(self) -> None:
        check_fields(self)

    def sessions(self) -> list[Session]:
        """All sessions, in the order of their times. ValueError if the trace is malformed."""
        rng = random.Random(self.seed)
        if self.trace is None:
            made = [Session(None, list(self._turns(rng, index))) for index in range(self.num_prompts or DEFAULT)]
        else:
            made = sorted(islice(read(self.trace, rng), self.num_prompts), key=lambda session: session.time or 0.0)
        if math.isinf(self.request_rate):
            return made
        gaps = [*accumulate(rng.gammavariate(self.burstiness, 1.0) for _ in made)]
        scale = len(made) / self.request_rate / (gaps[-1] or 1.0)  # so the mean rate is exact, as vLLM's
        return [Session(time * scale, session.turns) for time, session in zip(gaps, made, strict=True)]

    def _turns(self, rng: random.Random, index: int) -> Iterator[Turn]:
        """Lengths are those of phase 5's traces. The first prompt begins with a prefix; prefixes take turns."""
        lengths = Trace(
            prompt=self.input_len,
            answer=self.output_len,
            spread=self.spread,
            max_prompt=self.max_input_len if self.spread else self.input_len,
            max_answer=self.max_output_len if self.spread else self.output_len,
        )
        prompt = tokens(random.Random(f"{self.seed} {index % self.num_prefixes}"), self.prefix_len)
        for turn in range(self.turns):
            prompt += tokens(rng, lengths.prompt_length(rng))
            pause = rng.expovariate(1 / self.pause) if turn and self.pause else 0.0
            yield Turn(prompt, lengths.answer_length(rng), pause)
            prompt = []
