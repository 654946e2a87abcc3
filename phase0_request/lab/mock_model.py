"""MockModel: replays known answers, and takes the time that a model would take.

That is enough to build and to time all that is around a model: each step yields one token, the cost of a prompt grows
with its length, and a decode costs about the same for one request as for many.
"""

import asyncio
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from phase0_request.batch import Batch
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer

_HONOURED = {"max_tokens", "min_tokens", "stop", "stop_token_ids", "seed", "ignore_eos"}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds that a step takes. `step` stands for reading the weights, which does not depend on the batch."""

    step: float = 20.0
    prefill_token: float = 0.25
    decode_token: float = 0.1

    def of(self, batch: Batch) -> float:
        """Milliseconds for a batch."""
        prefill, decode = batch.tokens_by_kind
        return self.step + prefill * self.prefill_token + decode * self.decode_token if batch.slices else 0.0


class MockModel:
    """Replays the answer of a known prompt. For any other prompt it picks one of its answers by prompt and seed."""

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        eos_id: int,
        cost: StepCost = StepCost(),
    ) -> None:
        if not answers or not all(answers.values()):
            raise ValueError("the mock needs at least one answer, and no empty ones")
        self._answers = dict(answers)
        self._by_number = list(self._answers.values())
        self._eos_id = eos_id
        self.cost = cost

    @classmethod
    def replaying(
        cls,
        tokenizer: Tokenizer,
        pairs: Iterable[tuple[str, str]],
        cost: StepCost = StepCost(),
    ) -> "MockModel":
        """Create a mock from questions and answers as text."""
        if not tokenizer.eos_ids:
            raise ValueError("this tokenizer names no token that ends an answer; the mock needs one")
        answers = {tuple(tokenizer.encode(question)): tokenizer.encode(answer) for question, answer in pairs}
        return cls(answers, eos_id=min(tokenizer.eos_ids), cost=cost)

    def check(self, params: SamplingParams) -> None:
        """Reject sampling parameters that a model without sampling would ignore. Temperature 0 is accepted."""
        default = SamplingParams()
        for name in (f.name for f in fields(params)):
            given = getattr(params, name)
            if name not in _HONOURED and given != getattr(default, name) and (name, given) != ("temperature", 0):
                raise ValueError(f"{name}={given!r} is not supported by the mock model: it replays, it does not sample")

    async def run(self, batch: Batch) -> list[int | None]:
        """Run one step and sleep for the time that it takes."""
        tokens = self.step(batch)
        await asyncio.sleep(self.cost.of(batch) / 1000)
        return tokens

    def step(self, batch: Batch) -> list[int | None]:
        """The next token for each slice that completes its request, None for the others."""
        return [self.next_token(piece.request) if piece.completes else None for piece in batch]

    def next_token(self, request: Request) -> int:
        """The next token of the answer, then EOS. The answer repeats if the request may not end yet."""
        answer = self._answers.get(request.prompt_tokens) or self._by_number[self._number(request)]
        position = len(request.output_tokens)
        may_end = position >= request.params.min_tokens and not request.params.ignore_eos
        if position >= len(answer) and may_end:
            return self._eos_id
        return answer[position % len(answer)]

    def _number(self, request: Request) -> int:
        key = array("q", [request.params.seed or 0, *request.prompt_tokens])
        return zlib.crc32(key.tobytes()) % len(self._by_number)
