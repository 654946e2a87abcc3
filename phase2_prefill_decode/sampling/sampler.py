"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    logit_bias -> repetition penalty -> presence and frequency penalties -> masks -> the kernel `sample`

Masks come from grammars and lists of tokens (`constraints`). The kernel applies temperature and filters, and draws.
Log-probabilities are those of the model's own logits.

Models often have more rows in lm_head than their tokenizer has tokens: the vocabulary is padded to a round size. Padded
ids are never drawn, unless a request raises one with a positive logit_bias.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.batch import NO_TOKEN_LEFT, StepOutput
from phase0_request.checks import check_int
from phase0_request.request import Request, TokenLogprobs
from phase2_prefill_decode.kernels.draw import DRAW, SamplingTensors
from phase2_prefill_decode.kernels.mask import APPLY_MASK
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.constraints import Constraints, Follower, Grammars, StepMasks, is_constrained
from phase2_prefill_decode.sampling.inputs import (
    Edits,
    RequestEdits,
    SamplingMetadata,
    asks_for_more,
    key_of,
    moved,
    pack_edits,
    pack_padding,
    pack_params,
    positions_in,
    sampling_tensors,
    to_device,
)
from phase2_prefill_decode.sampling.logprobs import Logprobs, PromptLogprobs, logprobs_of


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, still on the device."""

    tokens: Tensor  # [rows] int64; 0 in a failed row
    peaks: Tensor  # [rows] float32; the largest logit after all edits. If it is not finite, the row failed
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    whole: Tensor | None = None  # [all numbers] float64, see `gather`

    @property
    def blocks(self) -> tuple[Logprobs, ...]:
        """The log-probabilities of the step."""
        own = () if self.logprobs is None else (self.logprobs,)
        return own if self.prompt_logprobs is None else (*own, *self.prompt_logprobs.blocks)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.peaks, *(tensor for block in self.blocks for tensor in block.tensors)]

    def gather(self) -> "Sampled":
        """Gather all of it in one tensor. float64 holds token ids exactly."""
        return replace(self, whole=torch.cat([tensor.flatten().double() for tensor in self.tensors]))

    def fetch(self) -> "Fetched":
        """Start to copy all of it to the host. On a GPU that goes on while the next step is launched."""
        if self.whole is None:
            return self.gather().fetch()
        lengths = [tensor.numel() for tensor in self.tensors]
        on_gpu = self.whole.device.type == "cuda"
        copy = torch.empty(self.whole.shape, dtype=self.whole.dtype, pin_memory=on_gpu)
        copy.copy_(self.whole, non_blocking=True)  # a recorded step writes its result to the same place again
        done = None
        if on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Fetched(self, copy, lengths, done)


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
        rows = len(numbers)  # a recorded step may have more
        for number, token, peak in zip(numbers, tokens[:rows], peaks[:rows], strict=True):
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
        grammars: Grammars | None = None,
    ) -> None:
        """`num_tokens` is the size of the tokenizer: ids from there on are padding. None: the vocabulary has none.
        Without `grammars`, a request with a grammar raises ValueError. A request without a seed derives one from `seed`
        and its id. None: from fresh entropy."""
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = check_int("vocab_size", vocab_size, 1)
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        self.device = torch.device(device)
        self.constraints = Constraints(vocab_size, grammars)
        self._sample = DRAW.on(self.device)
        self._apply_mask = APPLY_MASK.on(self.device)
        self._packed: list[ref[Request]] = []
        self._packed_params = np.empty(0, np.int32)
        self._packed_more = False  # whether one of them asks for more than a draw
        self._edits: WeakKeyDictionary[Request, RequestEdits] = WeakKeyDictionary()
        self._constraints: WeakKeyDictionary[Request, Follower] = WeakKeyDictionary()
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    @classmethod
    def of(cls, model: Model, seed: int | None = None) -> "Sampler":
        """The sampler of a model, on the model's device."""
        size, eos_ids, tokenizer = model.config.vocab_size, model.eos_ids, model.tokenizer
        grammars = None if tokenizer is None else Grammars(tokenizer, size, eos_ids)
        return cls(eos_ids, size, model.decoder.device, seed, num_tokens=model.num_tokens, grammars=grammars)

    def pack(self, requests: Sequence[Request], totals: Sequence[int] | None = None) -> SamplingMetadata:
        """What these requests ask for; row i of the logits belongs to requests[i]. `totals` are their tokens, those in
        flight included; None: nothing is in flight."""
        totals = [request.total for request in requests] if totals is None else totals
        params = self._params(requests, totals)
        if not self._packed_more:
            return SamplingMetadata(params)
        asked = tuple(
            (row, request.params.logprobs)
            for row, request in enumerate(requests)
            if request.params.logprobs is not None
        )
        return SamplingMetadata(
            params,
            pack_edits(requests, totals, self._edits_of, self.device),
            asked,
            pack_padding(requests, self.num_tokens, self.device) if self.num_tokens < self.vocab_size else None,
            self._masks(requests, totals),
        )

    def draw(self, logits: Tensor, params: SamplingTensors) -> Sampled:
        """Draw a token for each row, by temperature and filters alone."""
        return Sampled(*self._sample(logits, params, self.num_tokens))

    # region sample
    def sample(
        self,
        logits: Tensor,
        sampling: SamplingMetadata,
        params: SamplingTensors | None = None,
        newest: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed. `params` are those
        of `sampling` if they are on the device already, `newest` [rows] the newest tokens of the requests if some are
        in flight, `bits` the masks if they are filled already."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        num_tokens = self.num_tokens
        edited = logits if sampling.edits is None else edit(logits, sampling.edits, newest)
        if sampling.masks is not None:
            bits = moved(sampling.masks.filled().bits if bits is None else bits, self.device)
            edited = self._apply_mask(edited, bits, sampling.masks.numbers)
        if sampling.padding is not None:
            edited, num_tokens = without_padding(edited, num_tokens, sampling.padding), self.vocab_size
        if params is None:
            params = sampling_tensors(moved(torch.from_numpy(sampling.params), self.device))
        tokens, peaks = self._sample(edited, params, num_tokens)
        return Sampled(tokens, peaks, logprobs_of(logits, tokens, sampling.logprobs))

    # endregion

    def _edits_of(self, request: Request) -> RequestEdits:
        edits = self._edits.get(request)
        if edits is None:
            edits = self._edits[request] = RequestEdits(request, self.eos_ids, self.vocab_size)
        return edits

    def _masks(self, requests: Sequence[Request], totals: Sequence[int]) -> StepMasks | None:
        """The masks of the rows that are constrained, if any is."""
        rows = [
            (row, self.constraint_of(request), total - len(request.prompt_tokens))
            for row, (request, total) in enumerate(zip(requests, totals, strict=True))
            if is_constrained(request.params)
        ]
        if not rows:
            return None
        numbers = [-1] * len(requests)
        for number, (row, _, _) in enumerate(rows):
            numbers[row] = number
        return self.constraints.masks(rows, to_device(numbers, torch.int64, self.device))

    def constraint_of(self, request: Request) -> Follower:
        """The constraint of a live request. Where it takes time to make one, ask for it before the first draw."""
        constraint = self._constraints.get(request)
        if constraint is None:
            constraint = self._constraints[request] = self.constraints.of(request)
        return constraint

    def _params(self, requests: Sequence[Request], totals: Sequence[int]) -> NDArray[np.int32]:
        """The parameters of the last step again, if it had the same requests: only the positions are new."""
        known = len(requests) == len(self._packed)
        if not known or not all(one() is request for one, request in zip(self._packed, requests, strict=True)):
            self._packed, self._packed_params = [*map(ref, requests)], pack_params(requests, totals, self._key)
            self._packed_more = any(asks_for_more(request.params) for request in requests)
        params = self._packed_params.copy()
        positions_in(params)[:] = totals
        return params

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed


# region exercise 2.11
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


def without_padding(logits: Tensor, num_tokens: int, allowed: Tensor) -> Tensor:
    """Exclude padded ids from sampling, except `allowed` [2, n], the (row, token) that stay."""
    masked = logits.clone()
    masked[:, num_tokens:] = -torch.inf
    rows, tokens = allowed.unbind()
    masked[rows, tokens] = logits[rows, tokens]
    return masked


# endregion


def _reason(peak: float) -> str:
    """Why no token can be drawn from a row, if its largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return NO_TOKEN_LEFT
