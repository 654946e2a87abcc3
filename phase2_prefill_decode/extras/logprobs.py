"""Log-probabilities: of drawn tokens, of prompt tokens, and of the likeliest alternatives.

They are the softmax of the model's own logits, before logit_bias, penalties, temperature and filters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.params import SamplingParams, TokenLogprobs
from phase2_prefill_decode.extras.outcome import outcome_of
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work
from phase2_prefill_decode.transfer import moved, to_host

BLOCK = 64  # prompt rows at a time: each row of a large vocabulary takes megabytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of some rows."""

    alternatives: tuple[int, ...]  # how many each row asks for
    own: Tensor  # [rows] float32, of the token drawn or of the prompt
    top: Tensor  # [rows, most] float32, likeliest first, where `most` is the largest number of alternatives
    tokens: Tensor  # [rows, most] int64

    def to_host(self) -> "Logprobs":
        """Start to copy them to the host."""
        return Logprobs(self.alternatives, to_host(self.own), to_host(self.top), to_host(self.tokens))

    def read(self) -> list[TokenLogprobs]:
        """The log-probabilities of each row. Alternatives of -inf are left out."""
        rows = zip(self.alternatives, self.own.tolist(), self.top.tolist(), self.tokens.tolist(), strict=True)
        return [
            TokenLogprobs(
                own, tuple((token, p) for token, p in zip(tokens[:count], top, strict=False) if p > -math.inf)
            )
            for count, own, top, tokens in rows
        ]


def logprobs_of(logits: Tensor, tokens: Tensor, alternatives: tuple[int, ...]) -> Logprobs:
    """logits: [rows, vocab], the model's own; tokens: [rows]."""
    logprobs = logits.float().log_softmax(-1)
    top = likeliest(logprobs, max(alternatives))
    return Logprobs(alternatives, logprobs.gather(-1, tokens[:, None])[:, 0], logprobs.gather(-1, top), top)


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of each row, [rows, count]; among equals the lower id first. In float32.

    `topk` leaves the order of equals open, and bfloat16 logits have many. So it sorts unique integers instead: the bits
    of the number in the upper half, ordered by inverting those of negative ones, and the id in the lower half.
    """
    vocab = logprobs.shape[1]
    bits = logprobs.view(torch.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (order.long() << 32) - torch.arange(vocab, device=logprobs.device)
    return keys.topk(min(count, vocab)).indices


class DrawnLogprobs(Processor):
    """The log-probabilities of drawn tokens, for requests with `logprobs`."""

    def wants(self, params: SamplingParams) -> bool:
        return params.logprobs is not None

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        asked = [draw for draw in draws if draw.part.request.params.logprobs is not None]
        return DrawnLogprobsWork(asked) if asked else None


class DrawnLogprobsWork(Work):
    """The log-probabilities of the tokens that one step draws."""

    def __init__(self, asked: Sequence[DrawRow]) -> None:
        self.asked = asked

    def collect(self, logits: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        alternatives = tuple(draw.part.request.params.logprobs or 0 for draw in self.asked)
        rows = moved(torch.tensor([draw.row for draw in self.asked]), logits.device)
        self._logprobs = logprobs_of(logits[rows], tokens[rows], alternatives).to_host()

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        """Add the log-probabilities to the drawn tokens, including accepted drafts."""
        last, place = -1, 0
        for draw, logprobs in zip(self.asked, self._logprobs.read(), strict=True):
            last, place = draw.number, place + 1 if draw.number == last else 0
            if output.tokens[last] is None:
                continue
            outcome = outcome_of(output, last)
            if place == 0:
                outcome.logprobs = logprobs
            elif place <= len(outcome.verified):
                outcome.verified[place - 1] = outcome.verified[place - 1]._replace(logprobs=logprobs)


class PromptLogprobs(Processor):
    """The log-probabilities of prompt tokens, for requests with `prompt_logprobs`: rows that predict known tokens."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor]) -> None:
        self.lm_head = lm_head

    def wants(self, params: SamplingParams) -> bool:
        return params.prompt_logprobs is not None

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        counts = [*map(_predicted, batch.slices)]
        return PromptLogprobsWork(batch, counts, self.lm_head) if any(counts) else None


class PromptLogprobsWork(Work):
    """The first counts[i] rows of slice i predict tokens of its prompt."""

    def __init__(self, batch: Batch, counts: Sequence[int], lm_head: Callable[[Tensor], Tensor]) -> None:
        self.counts, self.lm_head = counts, lm_head
        self.targets = list[int]()
        alternatives = list[int]()
        rows, first = list[int](), 0
        for (request, start, length, _), count in zip(batch.slices, counts, strict=True):
            rows += range(first, first + count)
            first += length
            self.targets += request.prompt_tokens[start + 1 : start + 1 + count]
            alternatives += [request.params.prompt_logprobs or 0] * count
        self.rows, self.alternatives = rows, tuple(alternatives)

    def collect(self, logits: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Logits are computed for a block of rows at a time."""
        targets = moved(torch.tensor(self.targets), hidden.device)
        blocks = (slice(start, start + BLOCK) for start in range(0, len(self.targets), BLOCK))
        self._blocks = [
            logprobs_of(self.lm_head(hidden[rows]), targets[rows], self.alternatives[rows]).to_host() for rows in blocks
        ]

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        of_prompts = (of_token for block in self._blocks for of_token in block.read())
        for number, count in enumerate(self.counts):
            logprobs = list(islice(of_prompts, count))
            if any(math.isnan(of_token.logprob) for of_token in logprobs):
                output.failed.setdefault(number, "its prompt cannot be scored: there is NaN among the logits")
            elif logprobs:
                outcome_of(output, number).prompt_logprobs = logprobs


def _predicted(part: Slice) -> int:
    """The number of prompt tokens that a slice predicts. The last token of a prompt predicts the first drawn one."""
    request = part.request
    if request.params.prompt_logprobs is None:
        return 0
    return max(min(part.stop, len(request.prompt_tokens) - 1) - part.start, 0)
