"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    logit_bias -> repetition penalty -> presence and frequency penalties -> the kernel `sample`

The kernel applies temperature and filters, and draws. Log-probabilities are those of the model's own logits.

Models often have more rows in lm_head than their tokenizer has tokens: the vocabulary is padded to a round size. Padded
ids are never drawn, unless a request raises one with a positive logit_bias.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phase0_request.batch import StepOutput
from phase0_request.request import Request
from phase2_prefill_decode.kernels.sample import SAMPLE
from phase2_prefill_decode.logprobs import Logprobs, PromptLogprobs, logprobs_of
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling import (
    Edits,
    RequestEdits,
    SamplingMetadata,
    key_of,
    pack_edits,
    pack_padding,
    pack_params,
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, still on the device."""

    tokens: Tensor  # [rows] int64; 0 in a failed row
    peaks: Tensor  # [rows] float32; the largest logit after all edits. If it is not finite, the row failed
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        """Copy the result of a step of so many slices to the host; row i belongs to slice numbers[i]. Waits for the
        device, and fetches all that was drawn in one copy."""
        tokens, peaks, *found = _fetch(self)
        drawn: list[int | None] = [None] * slices
        failed = {}
        for number, token, peak in zip(numbers, tokens, peaks, strict=True):
            if math.isfinite(peak):
                drawn[number] = int(token)
            else:
                failed[number] = _reason(peak)
        asked = {} if self.logprobs is None else self.logprobs.by_row(*found)
        logprobs = {numbers[row]: of for row, of in asked.items() if numbers[row] not in failed}
        scores = {} if self.prompt_logprobs is None else self.prompt_logprobs.by_slice()
        for number, of_prompt in scores.items():
            if any(math.isnan(one.logprob) for one in of_prompt):
                failed.setdefault(number, "its prompt cannot be scored: there is NaN among the logits")
        return StepOutput(drawn, failed, logprobs, scores)


class Sampler:
    """Samples for the requests of one model on one device. Between steps it keeps which tokens a request with penalties
    has, as long as the request lives."""

    def __init__(
        self,
        eos_ids: Collection[int],
        vocab_size: int,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """`num_tokens` is the size of the tokenizer: ids from there on are padding. None: the vocabulary has none.
        Requests without a seed derive theirs from `seed` and their id. None: from fresh entropy."""
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be an integer from 1, got {vocab_size!r}")
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        self.device = torch.device(device)
        self._sample = SAMPLE.on(self.device)
        self._edits: WeakKeyDictionary[Request, RequestEdits] = WeakKeyDictionary()
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    @classmethod
    def of(cls, model: Model, seed: int | None = None) -> "Sampler":
        """The sampler of a model, on the model's device."""
        return cls(model.eos_ids, model.config.vocab_size, model.decoder.device, seed, num_tokens=model.num_tokens)

    def pack(self, requests: Sequence[Request]) -> SamplingMetadata:
        """The sampling parameters of these requests; row i of the logits belongs to requests[i]."""
        asked = tuple(
            (row, request.params.logprobs)
            for row, request in enumerate(requests)
            if request.params.logprobs is not None
        )
        return SamplingMetadata(
            pack_params(requests, self._key, self.device),
            pack_edits(requests, self._edits_of, self.device),
            asked,
            pack_padding(requests, self.num_tokens, self.device) if self.num_tokens < self.vocab_size else None,
        )

    # region sample
    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        num_tokens = self.num_tokens
        edited = logits if sampling.edits is None else edit(logits, sampling.edits)
        if sampling.padding is not None:
            edited, num_tokens = without_padding(edited, num_tokens, sampling.padding), self.vocab_size
        tokens, peaks = self._sample(edited, sampling.params, num_tokens)
        return Sampled(tokens, peaks, logprobs_of(logits, tokens, sampling.logprobs))

    # endregion

    def _edits_of(self, request: Request) -> RequestEdits:
        edits = self._edits.get(request)
        if edits is None:
            edits = self._edits[request] = RequestEdits(request, self.eos_ids, self.vocab_size)
        return edits

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed


def edit(logits: Tensor, edits: Edits) -> Tensor:
    """Apply logit_bias and penalties, in float32. -inf and NaN stay as they are."""
    logits = logits.float()
    x = logits[edits.rows, edits.tokens] + edits.bias
    x = torch.where(x > 0, x / edits.scale, x * edits.scale) - edits.minus
    return logits.index_put((edits.rows, edits.tokens), x)


def without_padding(logits: Tensor, num_tokens: int, allowed: Tensor) -> Tensor:
    """Exclude padded ids from sampling, except `allowed` [2, n], the (row, token) that stay."""
    masked = logits.clone()
    masked[:, num_tokens:] = -torch.inf
    rows, tokens = allowed.unbind()
    masked[rows, tokens] = logits[rows, tokens]
    return masked


def _fetch(sampled: Sampled) -> list[list[float]]:
    """Fetch tokens, peaks and log-probabilities in one copy, each flattened. float64 holds token ids exactly."""
    tensors = [sampled.tokens, sampled.peaks]
    if sampled.logprobs is not None:
        tensors += [sampled.logprobs.drawn, sampled.logprobs.top, sampled.logprobs.tokens]
    whole = iter(torch.cat([tensor.flatten().double() for tensor in tensors]).tolist())
    return [list(islice(whole, tensor.numel())) for tensor in tensors]


def _reason(peak: float) -> str:
    """Why no token can be drawn from a row whose largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return "no token can be drawn: all logits are -inf, so the model, logit_bias and min_tokens leave none"
