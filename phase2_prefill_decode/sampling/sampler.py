"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    logit_bias -> repetition penalty -> presence and frequency penalties -> masks -> the kernel `draw`

Masks come from grammars and lists of tokens (`constraints`). The kernel applies temperature and filters, and draws.
Log-probabilities are those of the model's own logits.

Models often have more rows in lm_head than their tokenizer has tokens: the vocabulary is padded to a round size. Padded
ids are never drawn.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from phase0_request.request import Request
from phase2_prefill_decode.extras.grammar.constraints import Constraints, Follower, is_constrained
from phase2_prefill_decode.extras.grammar.grammar import Grammars
from phase2_prefill_decode.extras.grammar.mask import APPLY_MASK
from phase2_prefill_decode.extras.logprobs import Logprobs, logprobs_of
from phase2_prefill_decode.extras.penalties import RequestEdits, edit, pack_edits, wants_edits
from phase2_prefill_decode.kernels.draw import DRAW
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.inputs import Columns, SamplingInputs, key_of, pack_columns
from phase2_prefill_decode.sampling.metadata import SamplingMetadata, asks_for_more
from phase2_prefill_decode.transfer import moved, to_device, to_host


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step."""

    tokens: Tensor  # [rows] int64; 0 in a failed row
    peaks: Tensor  # [rows] float32; the largest logit after all edits. If it is not finite, the row failed
    logprobs: Logprobs | None = None  # of the rows that ask for them
    prompt_logprobs: Sequence[Logprobs] = ()  # of all prompt tokens that the step scores
    hidden: Tensor | None = None  # [rows, hidden_size] float32, of the rows that ask for it

    def to_host(self) -> "Sampled":
        """Start to copy it to the host."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        of_prompts = [block.to_host() for block in self.prompt_logprobs]
        hidden = None if self.hidden is None else to_host(self.hidden)
        return Sampled(to_host(self.tokens), to_host(self.peaks), logprobs, of_prompts, hidden)


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
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        self.device = torch.device(device)
        self.constraints = Constraints(vocab_size, grammars)
        self._draw = DRAW.on(self.device)
        self._apply_mask = APPLY_MASK.on(self.device)
        self.follows = True  # constraints; and gives logprobs
        self._packed: list[ref[Request]] = []
        self._columns = pack_columns((), (), self._key)  # theirs
        self._asks_for_more = False  # one of them
        self._edits: WeakKeyDictionary[Request, RequestEdits] = WeakKeyDictionary()
        self._constraints: WeakKeyDictionary[Request, Follower] = WeakKeyDictionary()
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    @classmethod
    def of(cls, model: Model, seed: int | None = None) -> "Sampler":
        """The sampler of a model, on the model's device."""
        size, eos_ids, tokenizer = model.config.vocab_size, model.eos_ids, model.tokenizer
        grammars = None if tokenizer is None else Grammars(tokenizer, size, eos_ids)
        return cls(eos_ids, size, model.decoder.device, seed, num_tokens=model.num_tokens, grammars=grammars)

    def for_drafts(self) -> "Sampler":
        """The sampler of a draft model: with the same noise, filters, bias and penalties. Masks and logprobs are left
        to this one."""
        made = copy(self)
        made.follows = False
        return made

    def pack(self, requests: Sequence[Request], totals: Sequence[int] | None = None) -> SamplingMetadata:
        """What these requests ask for; row i of the logits belongs to requests[i]. `totals` are their tokens, those in
        flight included; None: nothing is in flight."""
        totals = [request.total for request in requests] if totals is None else totals
        columns = self._pack_columns(requests, totals)
        if not self._asks_for_more:
            return SamplingMetadata(len(requests), columns)
        drawn = [
            (row, request, total - len(request.prompt_tokens))
            for row, (request, total) in enumerate(zip(requests, totals, strict=True))
        ]
        return SamplingMetadata(
            len(requests),
            columns,
            [(row, self._edits_of(req), index) for row, req, index in drawn if wants_edits(req.params, index)],
            [
                (row, self.constraint_of(req), index, [*req.draft])
                for row, req, index in drawn
                if self.follows and is_constrained(req.params) and not (req.draft and index > len(req.output_tokens))
            ],
            [(row, p.logprobs) for row, req, _ in drawn if self.follows and (p := req.params).logprobs is not None],
            [row for row, req, index in drawn if self.follows and req.params.embed and not index],
        )

    def draw(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """Draw a token for each row, by temperature and filters alone."""
        return Sampled(*self._draw(logits, inputs, self.num_tokens))

    # region sample
    def sample(
        self,
        logits: Tensor,
        sampling: SamplingMetadata,
        inputs: SamplingInputs | None = None,
        bits: Tensor | None = None,
    ) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed. `inputs` are those
        of `sampling` if they are on the device already, `bits` the masks if they are filled already."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        edits = pack_edits(sampling.edits, self.device) if sampling.edits else None
        edited = logits if edits is None else edit(logits, edits)
        if sampling.masks:
            bits = moved(self.constraints.fill(sampling.masks).bits if bits is None else bits, self.device)
            masked = [row + place for row, _, _, draft in sampling.masks for place in range(1 + len(draft))]
            numbers = {row: number for number, row in enumerate(masked)}  # of each row's mask
            of_rows = [numbers.get(row, -1) for row in range(sampling.rows)]
            edited = self._apply_mask(edited, bits, to_device(of_rows, torch.int64, self.device))
        if inputs is None:
            inputs = SamplingInputs(*(moved(torch.from_numpy(column), self.device) for column in sampling.columns))
        tokens, peaks = self._draw(edited, inputs, self.num_tokens)
        if not sampling.logprobs:
            return Sampled(tokens, peaks)
        asked, alternatives = zip(*sampling.logprobs, strict=True)
        rows = to_device(asked, torch.int64, self.device)
        return Sampled(tokens, peaks, logprobs_of(logits[rows], tokens[rows], alternatives))

    # endregion

    def _edits_of(self, request: Request) -> RequestEdits:
        edits = self._edits.get(request)
        if edits is None:
            edits = self._edits[request] = RequestEdits(request, self.eos_ids)
        return edits

    def constraint_of(self, request: Request) -> Follower:
        """The constraint of a live request. Where it takes time to make one, ask for it before the first draw."""
        constraint = self._constraints.get(request)
        if constraint is None:
            constraint = self._constraints[request] = self.constraints.of(request)
        return constraint

    def _pack_columns(self, requests: Sequence[Request], totals: Sequence[int]) -> Columns:
        """The columns of the last step again, if it had the same requests: only the positions are new. A request has a
        row for its next token, and more behind it for a draft."""
        each = [*dict.fromkeys(requests)]
        known = len(each) == len(self._packed)
        if not known or not all(packed() is request for packed, request in zip(self._packed, each, strict=True)):
            self._packed, self._columns = [*map(ref, each)], pack_columns(each, totals[: len(each)], self._key)
            self._asks_for_more = any(asks_for_more(request.params) for request in each)
        keys, _, *others = self._columns
        if len(each) < len(requests):
            rows = [*Counter(requests).values()]
            keys, *others = (column.repeat(rows) for column in (keys, *others))
        return keys, np.array(totals, np.int64), *others

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed
