"""Sampler: draws the next token of each row of logits. A draw depends on the request's seed and the position alone.

    processors edit the logits -> the kernel `draw` -> processors collect results

The kernel applies temperature and filters, and draws; most requests ask for no more. There is no generator state, so no
other request of the batch can change a draw.

Models often have more rows in lm_head than their tokenizer has tokens: the vocabulary is padded to a round size. Padded
ids are never drawn.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from hashlib import blake2b
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.batch import Batch
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.kernels.draw import Draw, SamplingInputs, reference, signed
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work

COLDEST = 1e-30  # smaller temperatures would be 0 in float32; at this one only the likeliest token has weight
Columns = tuple[NDArray[Any], ...]  # the fields of SamplingInputs on the host, in their order


class Sampler:
    """Samples for the requests of one model on one device."""

    def __init__(
        self,
        vocab_size: int,
        seed: int | None = None,
        *,
        num_tokens: int | None = None,
        processors: Sequence[Processor] = (),
        draw: Draw = reference,
    ) -> None:
        """`num_tokens` is the size of the tokenizer: ids from there on are padding. None: there is no padding. A
        request without a seed derives one from `seed` and its id. None: from fresh entropy. `draw` is the kernel."""
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        self.processors = processors
        self._wants = [processor.wants for processor in processors]
        self._draw = draw
        self._packed: list[ref[Request]] = []  # the requests of the last step
        self._columns = NO_COLUMNS  # theirs
        self._asks_for_more = False  # one of them
        self._entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()[:64]

    def limited(self, processors: Sequence[Processor]) -> "Sampler":
        """A sampler with the same noise and only these processors."""
        made = copy(self)
        made.processors, made._wants = processors, [processor.wants for processor in processors]
        made._packed, made._columns, made._asks_for_more = [], NO_COLUMNS, False
        return made

    def prepare(self, request: Request) -> None:
        """Get ready for a request, before its first step. ValueError if it cannot be served."""
        for processor in self.processors:
            if processor.wants(request.params):
                processor.prepare(request)

    # region pack
    def pack(self, batch: Batch) -> tuple[Columns, Sequence[Work]]:
        """The parameters of a step's draws, and the work of processors. A slice that reaches the newest token of its
        request has a row for its next token, and one more for each token beyond."""
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
        if not (self._asks_for_more or asks or len(requests) > len(batch.slices)):
            return columns, ()
        rows, row = list[DrawRow](), 0
        for number, part in enumerate(batch.slices):
            while row < len(requests) and requests[row] is part.request:
                rows.append(DrawRow(row, number, part, totals[row] - len(part.request.prompt_tokens)))
                row += 1
        works = [processor.pack(batch, rows) for processor in self.processors]
        return columns, [work for work in works if work is not None]

    # endregion

    # region sample
    def sample(self, logits: Tensor, inputs: SamplingInputs, works: Sequence[Work] = ()) -> tuple[Tensor, Tensor]:
        """Draw a token for each row. logits: [rows, vocab], of any float type; they are not changed. Returns the tokens
        and the largest logits after all edits, as `Draw` says."""
        if logits.shape != (*inputs.keys.shape, self.vocab_size):
            wanted = [*inputs.keys.shape, self.vocab_size]
            raise ValueError(f"logits must be {wanted} for these requests, got {list(logits.shape)}")
        for work in works:
            logits = work.edit(logits)
        return self._draw(logits, inputs, self.num_tokens)

    # endregion

    def _asks(self, request: Request) -> bool:
        params = request.params
        for wants in self._wants:  # noqa: SIM110 a generator would take twice the time
            if wants(params):
                return True
        return False

    def _pack_columns(self, requests: Sequence[Request], totals: Sequence[int]) -> Columns:
        """Reuse the columns of the last step, with new positions, if it had the same requests."""
        each = [*dict.fromkeys(requests)]
        if (packed := [*map(ref, each)]) != self._packed:
            self._packed, self._columns = packed, pack_columns(each, [0] * len(each), self._key)
            self._asks_for_more = any(map(self._asks, each))
        keys, _, *others = self._columns
        if len(each) < len(requests):
            rows = [*Counter(requests).values()]
            keys, *others = (column.repeat(rows) for column in (keys, *others))
        return keys, np.array(totals, np.int64), *others

    def _key(self, request: Request) -> int:
        seed = request.params.seed
        return key_of(request.id, self._entropy) if seed is None else seed


def pack_columns(requests: Sequence[Request], totals: Sequence[int], key: Callable[[Request], int]) -> Columns:
    """The columns of these requests. `totals` are the positions to draw, `key` is a request's seed."""
    params = [request.params for request in requests]
    return (
        np.array([signed(key(request)) for request in requests], np.int64),
        np.array(totals, np.int64),
        np.array([p.top_k for p in params], np.int32),
        np.array([0 if is_greedy(p) else max(p.temperature, COLDEST) for p in params], np.float32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
    )


NO_COLUMNS = pack_columns((), (), hash)


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the likeliest token (of equals the lowest id). `top_k=1` is greedy too."""
    return params.temperature == 0 or params.top_k == 1


def key_of(name: str, entropy: bytes) -> int:
    """A key for a request without a seed: the same in every process for one request id and entropy."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=entropy).digest(), "big")
