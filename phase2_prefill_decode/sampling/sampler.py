"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    processors edit the logits -> the kernel `draw` -> processors collect results

The kernel applies temperature and filters, and draws. Most requests ask for no more (`processors`).

Models often have more rows in lm_head than their tokenizer has tokens: the vocabulary is padded to a round size. Padded
ids are never drawn.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from phase0_request.batch import Batch
from phase0_request.request import Request
from phase2_prefill_decode.backends import backend_for
from phase2_prefill_decode.kernels.draw import Draw as DrawTokens
from phase2_prefill_decode.sampling.inputs import Columns, SamplingInputs, key_of, pack_columns
from phase2_prefill_decode.sampling.metadata import SamplingMetadata
from phase2_prefill_decode.sampling.processors import DrawRow, Processor
from phase2_prefill_decode.transfer import moved, to_host


@dataclass(frozen=True, slots=True)
class Sampled:
    """The draws of a step."""

    tokens: Tensor  # [rows] int64; 0 in a failed row
    peaks: Tensor  # [rows] float32; the largest logit after all edits. If it is not finite, the row failed

    def to_host(self) -> "Sampled":
        """Start to copy them to the host."""
        return Sampled(to_host(self.tokens), to_host(self.peaks))


class Sampler:
    """Samples for the requests of one model on one device."""

    def __init__(
        self,
        vocab_size: int,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        *,
        num_tokens: int | None = None,
        processors: Sequence[Processor] = (),
        draw: DrawTokens | None = None,
    ) -> None:
        """`num_tokens` is the size of the tokenizer: ids from there on are padding. None: the vocabulary has none. A
        request without a seed derives one from `seed` and its id. None: from fresh entropy. `draw` is by default the
        fastest kernel of the device."""
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        self.device = torch.device(device)
        self.processors = processors
        self._wants = [processor.wants for processor in processors]
        self._draw = draw or backend_for(self.device).draw
        self._packed: list[ref[Request]] = []
        self._columns = pack_columns((), (), self._key)  # theirs
        self._asks_for_more = False  # one of them
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    def limited(self, processors: Sequence[Processor]) -> "Sampler":
        """A sampler with the same noise, and these processors only."""
        made = copy(self)
        made.processors, made._packed, made._asks_for_more = processors, [], False
        made._wants = [processor.wants for processor in processors]
        made._columns = pack_columns((), (), made._key)
        return made

    def prepare(self, request: Request) -> None:
        """Get ready for a request, before its first step. ValueError if it asks for what it cannot have."""
        for processor in self.processors:
            if processor.wants(request.params):
                processor.prepare(request)

    # region pack
    def pack(self, batch: Batch) -> SamplingMetadata:
        """What the rows of a step ask for. A slice that completes its request has a row for its next token, and one
        more for each token beyond."""
        requests: list[Request] = []
        totals: list[int] = []  # the position of the token to draw, from each row
        asks = False
        for request, start, length, beyond in batch.slices:
            stop = start + length
            if stop < request.total:
                asks = asks or self._asks(request)
            elif beyond:
                draws = min(1 + len(beyond), length)
                requests += [request] * draws
                totals += range(stop - draws + 1, stop + 1)
            else:
                requests.append(request)
                totals.append(stop)
        columns = self._pack_columns(requests, totals)
        if not (self._asks_for_more or asks or len(requests) > len(batch)):
            return SamplingMetadata(len(requests), columns)
        rows, row = list[DrawRow](), 0
        for number, part in enumerate(batch.slices):
            while row < len(requests) and requests[row] is part.request:
                rows.append(DrawRow(row, number, part, totals[row] - len(part.request.prompt_tokens)))
                row += 1
        works = [processor.pack(batch, rows) for processor in self.processors]
        return SamplingMetadata(len(requests), columns, [work for work in works if work is not None])

    # endregion

    def draw(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """Draw a token for each row, by temperature and filters alone."""
        return Sampled(*self._draw(logits, inputs, self.num_tokens))

    # region sample
    def sample(self, logits: Tensor, sampling: SamplingMetadata, inputs: SamplingInputs | None = None) -> Sampled:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed. `inputs` are those
        of `sampling` if they are on the device already."""
        if logits.shape != (sampling.rows, self.vocab_size):
            wanted = f"[{sampling.rows}, {self.vocab_size}]"
            raise ValueError(f"logits must be {wanted} for {sampling.rows} requests, got {list(logits.shape)}")
        for work in sampling.works:
            logits = work.edit(logits)
        if inputs is None:
            inputs = SamplingInputs(*(moved(torch.from_numpy(column), self.device) for column in sampling.columns))
        return self.draw(logits, inputs)

    # endregion

    def _asks(self, request: Request) -> bool:
        params = request.params
        for wants in self._wants:  # noqa: SIM110 a generator would take twice the time
            if wants(params):
                return True
        return False

    def _pack_columns(self, requests: Sequence[Request], totals: Sequence[int]) -> Columns:
        """The columns of the last step again, if it had the same requests: only the positions are new."""
        each = [*dict.fromkeys(requests)]
        known = len(each) == len(self._packed)
        if not known or not all(packed() is request for packed, request in zip(self._packed, each, strict=True)):
            self._packed, self._columns = [*map(ref, each)], pack_columns(each, totals[: len(each)], self._key)
            self._asks_for_more = any(map(self._asks, each))
        keys, _, *others = self._columns
        if len(each) < len(requests):
            rows = [*Counter(requests).values()]
            keys, *others = (column.repeat(rows) for column in (keys, *others))
        return keys, np.array(totals, np.int64), *others

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed
