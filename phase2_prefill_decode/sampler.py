"""Sampler: logits in, the next token of each row out. What a row draws depends on its seed and position alone.

    bias -> repetition penalty -> presence and frequency penalties -> temperature -> min_p -> top_k -> top_p -> draw

Each filter takes shares of what the one before it left. A log-probability is of none of this: it is what the model
itself said, the softmax of its logits as they came.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from phase0_request.batch import StepOutput
from phase0_request.request import Request
from phase2_prefill_decode.draws import key_of
from phase2_prefill_decode.filters import cut, draw, min_p, top_k, top_p, weigh
from phase2_prefill_decode.logprobs import Logprobs, logprobs_of
from phase2_prefill_decode.sampling import Draws, Edits, Sampling, pack_draws, pack_edits


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, still on the device."""

    tokens: Tensor  # [rows] int64; anything in a row that failed, though always an id of the vocabulary
    peaks: Tensor  # [rows]; the largest logit after all edits. It is finite, or nothing could be drawn from this row
    logprobs: Logprobs | None = None

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        """On the host: a step of so many slices, in which row i is of the slice numbers[i]. Waits for the device, and
        fetches everything in one copy."""
        tokens, peaks, *found = _fetch(self)
        drawn: list[int | None] = [None] * slices
        failed = {}
        for number, token, peak in zip(numbers, tokens, peaks, strict=True):
            if math.isfinite(peak):
                drawn[number] = int(token)
            else:
                failed[number] = _why(peak)
        asked = {} if self.logprobs is None else self.logprobs.by_row(*found)
        logprobs = {numbers[row]: of for row, of in asked.items() if numbers[row] not in failed}
        return StepOutput(drawn, failed, logprobs)


class Sampler:
    """Draws for the requests of one model on one device. It remembers nothing from one step to the next."""

    def __init__(
        self,
        eos_ids: Collection[int],
        vocab_size: int,
        device: str | torch.device = "cpu",
        seed: int | None = None,
    ) -> None:
        """`seed` is for requests that bring none: theirs is made of it and of their id. None: of something new."""
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be an integer from 1, got {vocab_size!r}")
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    def pack(self, requests: Sequence[Request]) -> Sampling:
        """What these requests ask of their next tokens; row i of the logits is of requests[i]."""
        asked = tuple(
            (row, request.params.logprobs)
            for row, request in enumerate(requests)
            if request.params.logprobs is not None
        )
        return Sampling(
            len(requests),
            pack_edits(requests, self.eos_ids, self.vocab_size, self.device),
            pack_draws(requests, self._key, self.vocab_size, self.device),
            asked,
        )

    # region sample
    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they stay as they are."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        edited = logits if sampling.edits is None else edit(logits, sampling.edits)
        peaks, tokens = edited.max(-1)  # of a row with NaN the peak is NaN: one pass finds the token and what is wrong
        if sampling.draws is not None:
            drawn = draw(weights_of(edited, peaks, sampling.draws), sampling.draws.uniforms)
            rows = sampling.draws.rows
            tokens = drawn if rows is None else tokens.index_copy(0, rows, drawn)
        return Sampled(tokens, peaks, logprobs_of(logits, tokens, sampling.logprobs))

    # endregion

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed


def edit(logits: Tensor, edits: Edits) -> Tensor:
    """Changed logits, in float32. -inf stays -inf and NaN stays NaN, whatever is added."""
    logits = logits.float()
    x = logits[edits.rows, edits.tokens] + edits.bias
    x = torch.where(x > 0, x / edits.scale, x * edits.scale) - edits.minus
    return logits.index_put((edits.rows, edits.tokens), x)


def weights_of(logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
    """What each token weighs in the draw after all filters, for the rows that draw."""
    if draws.rows is not None:
        logits, peaks = logits[draws.rows], peaks[draws.rows]
    weights = weigh(logits, peaks, draws.temperatures)
    for ask, least in ((draws.min_p, min_p), (draws.top_k, top_k), (draws.top_p, top_p)):
        if ask is not None:
            cut(weights, ask, least)
    return weights


def _fetch(sampled: Sampled) -> list[list[float]]:
    """The numbers of tokens, peaks and, if asked, log-probabilities, each flat. float64 holds token ids exactly."""
    tensors = [sampled.tokens, sampled.peaks]
    if sampled.logprobs is not None:
        tensors += [sampled.logprobs.drawn, sampled.logprobs.top, sampled.logprobs.tokens]
    whole = iter(torch.cat([tensor.flatten().double() for tensor in tensors]).tolist())
    return [list(islice(whole, tensor.numel())) for tensor in tensors]


def _why(peak: float) -> str:
    """What is wrong with a row whose largest logit is not a number to reckon with."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return "no token can be drawn: all logits are -inf, so the model, logit_bias and min_tokens leave none"
