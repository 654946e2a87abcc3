"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    logit_bias -> repetition penalty -> presence and frequency penalties -> temperature -> min_p -> top_k -> top_p

Each filter works on what the one before it kept. Log-probabilities are those of the model's own logits.

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
from phase0_request.request import Request, TokenLogprobs
from phase2_prefill_decode.filters import cut, draw, min_p, top_k, top_p, weigh
from phase2_prefill_decode.logprobs import Logprobs, PromptLogprobs, logprobs_of
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling import (
    Draws,
    Edits,
    RequestEdits,
    SamplingMetadata,
    key_of,
    pack_draws,
    pack_edits,
    pack_padding,
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, still on the device."""

    tokens: Tensor  # [rows] int64; in a failed row any id of the vocabulary
    peaks: Tensor  # [rows]; the largest logit after all edits. If it is not finite, the row failed
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def fetch(self) -> "Fetched":
        """Start to copy all of it to the host, in one copy. On a GPU that goes on while the next step is launched."""
        blocks = (*(() if self.logprobs is None else (self.logprobs,)), *self.prompt_blocks)
        tensors = [self.tokens, self.peaks, *(tensor for block in blocks for tensor in block.tensors)]
        whole = torch.cat([tensor.flatten().double() for tensor in tensors])  # float64 holds token ids exactly
        lengths = [tensor.numel() for tensor in tensors]
        if whole.device.type != "cuda":
            return Fetched(self, whole, lengths, None)
        copy = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Fetched(self, copy, lengths, done)

    @property
    def prompt_blocks(self) -> tuple[Logprobs, ...]:
        return () if self.prompt_logprobs is None else self.prompt_logprobs.blocks


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a step on its way to the host."""

    sampled: Sampled
    whole: Tensor  # [all numbers] float64
    lengths: Sequence[int]  # of the parts
    done: torch.cuda.Event | None  # recorded after the copy; None: it is there

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        """Wait for the result of a step of so many slices; row i belongs to slice numbers[i]."""
        if self.done is not None:
            self.done.synchronize()
        all_numbers = iter(self.whole.tolist())
        tokens, peaks, *found = (list(islice(all_numbers, length)) for length in self.lengths)
        drawn: list[int | None] = [None] * slices
        failed = {}
        for number, token, peak in zip(numbers, tokens, peaks, strict=True):
            if math.isfinite(peak):
                drawn[number] = int(token)
            else:
                failed[number] = _reason(peak)
        sampled = self.sampled
        asked: dict[int, TokenLogprobs] = {}
        if sampled.logprobs is not None:
            asked, found = sampled.logprobs.by_row(*found[:3]), found[3:]
        logprobs = {numbers[row]: of for row, of in asked.items() if numbers[row] not in failed}
        scores = {} if sampled.prompt_logprobs is None else sampled.prompt_logprobs.by_slice(found)
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
        self._edits: WeakKeyDictionary[Request, RequestEdits] = WeakKeyDictionary()
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    @classmethod
    def of(cls, model: Model, seed: int | None = None) -> "Sampler":
        """The sampler of a model, on the model's device."""
        return cls(model.eos_ids, model.config.vocab_size, model.decoder.device, seed, num_tokens=model.num_tokens)

    def pack(self, requests: Sequence[Request], totals: Sequence[int] | None = None) -> SamplingMetadata:
        """The sampling parameters of these requests; row i of the logits belongs to requests[i]. `totals` are their
        tokens, those in flight included; None: nothing is in flight."""
        totals = [request.total for request in requests] if totals is None else totals
        asked = tuple(
            (row, request.params.logprobs)
            for row, request in enumerate(requests)
            if request.params.logprobs is not None
        )
        return SamplingMetadata(
            len(requests),
            pack_edits(requests, totals, self._edits_of, self.device),
            pack_draws(requests, totals, self._key, self.vocab_size, self.num_tokens, self.device),
            asked,
            pack_padding(requests, self.num_tokens, self.device) if self.num_tokens < self.vocab_size else None,
        )

    # region sample
    def sample(self, logits: Tensor, sampling: SamplingMetadata, newest: Tensor | None = None) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed. `newest` [rows]
        are the newest tokens of the requests; None: the host knows all of them."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        edited = logits if sampling.edits is None else edit(logits, sampling.edits, newest)
        if self.num_tokens < self.vocab_size:
            edited = without_padding(edited, self.num_tokens, sampling.padding)
        peaks, tokens = edited.max(-1)  # one pass finds the token, and NaN: then the peak is NaN
        if sampling.draws is not None:
            drawn = draw(weights_of(edited, peaks, sampling.draws), sampling.draws.uniforms)
            rows = sampling.draws.rows
            tokens = drawn if rows is None else tokens.index_copy(0, rows, drawn)
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


def edit(logits: Tensor, edits: Edits, newest: Tensor | None = None) -> Tensor:
    """Apply logit_bias and penalties, in float32. -inf and NaN stay as they are."""
    logits, at, scale, minus = logits.float(), (edits.rows, edits.tokens), edits.scale, edits.minus
    if edits.in_flight is None or newest is None:
        return logits.index_put(at, penalized(logits[at] + edits.bias, scale, minus))
    more = edits.in_flight
    of_row = torch.full_like(newest, -1).index_copy(0, more.rows, newest[more.rows])
    again = edits.tokens == of_row[edits.rows]
    scale, minus = torch.where(again, more.scale, scale), torch.where(again, more.minus, minus)
    logits = logits.index_put(at, penalized(logits[at] + edits.bias, scale, minus))
    listed = torch.zeros_like(newest).index_add(0, edits.rows, again.long())[more.rows] > 0
    at = more.rows, newest[more.rows]
    once = penalized(logits[at], more.new_scale, more.new_minus)
    return logits.index_put_(at, torch.where(listed, logits[at], once))


def penalized(x: Tensor, scale: Tensor, minus: Tensor) -> Tensor:
    """Logits with the penalties of tokens that have occurred."""
    return torch.where(x > 0, x / scale, x * scale) - minus


def without_padding(logits: Tensor, num_tokens: int, allowed: Tensor | None) -> Tensor:
    """Exclude padded ids from sampling. `allowed` [2, n] are the (row, token) that stay."""
    if allowed is None:
        return logits[:, :num_tokens]  # a view: costs nothing
    masked = logits.clone()
    masked[:, num_tokens:] = -torch.inf
    rows, tokens = allowed.unbind()
    masked[rows, tokens] = logits[rows, tokens]
    return masked


def weights_of(logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
    """The weight of each token after all filters, for the rows that draw."""
    if draws.rows is not None:
        logits, peaks = logits[draws.rows], peaks[draws.rows]
    weights = weigh(logits, peaks, draws.temperatures, draws.vocab_size)
    for params, least in ((draws.min_p, min_p), (draws.top_k, top_k), (draws.top_p, top_p)):
        if params is not None:
            cut(weights, params, least)
    return weights


def _reason(peak: float) -> str:
    """Why no token can be drawn from a row whose largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return "no token can be drawn: all logits are -inf, so the model, logit_bias and min_tokens leave none"
