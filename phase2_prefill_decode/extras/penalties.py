"""Logit edits: logit_bias, min_tokens, and penalties for tokens that have occurred.

The host lists the edits of a step, and the device applies them. If they depend on a token in flight, the host lists
them once the step that draws it has ended; by then the device already runs the model for the next step.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.batch import Batch, StepOutput
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work
from phase2_prefill_decode.transfer import moved


class Edits(NamedTuple):
    """The logits to change before sampling: each (row, token) once."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    bias: Tensor  # [n] float32; added first: logit_bias, or -inf for a token that min_tokens forbids
    scale: Tensor  # [n] float32; the repetition penalty, or 1
    minus: Tensor  # [n] float32; presence and frequency penalty, subtracted last


class RequestEdits:
    """The logit changes for the next token of one request. Each token is counted once, when it is new, so the cost of a
    step depends on the number of different tokens and not on the length of the context.

    Before `min_tokens`, tokens that would end the request are forbidden, by the rule of `batch.reason_to_finish`: with
    `ignore_eos`, end-of-sequence tokens end nothing and are allowed. The repetition penalty counts tokens of prompt and
    output, as in transformers; presence and frequency penalties count the output alone, as in OpenAI's API.
    """

    def __init__(self, request: Request, eos_ids: Collection[int]) -> None:
        params, bias = request.params, dict(request.params.logit_bias)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else ()
        seen = request.prompt_tokens if params.repetition_penalty != 1 else ()
        self.output: Sequence[int] = request.output_tokens  # committed
        self._params = params
        self._counted = 0  # tokens of the output
        self._drawn: tuple[int, int] | None = None  # the latest token and its index; it may not be committed yet
        self._columns: dict[int, int] = {}  # where each token has its edits
        self._edits = np.zeros((4, 16))  # token, bias, scale, minus
        self._times = np.zeros(16, np.int64)  # in the output
        for token in (*bias, *stops, *seen):
            self._column(token)
        self._edits[1, [self._columns[token] for token in bias]] = [*bias.values()]
        self._edits[2, [self._columns[token] for token in {*seen}]] = params.repetition_penalty
        self._stops = [self._columns[stop] for stop in stops]
        self._bias_of_stops = self._edits[1, self._stops]

    def take(self, index: int, token: int) -> None:
        """Note that output token `index` was drawn. It counts until it is committed, or until another token is drawn
        there."""
        self._drawn = index, token

    def at(self, index: int, draft: Sequence[int] = ()) -> NDArray[np.float64]:
        """The changes where output token `index` is to be drawn, with the tokens of a draft before it: [4, n] of token,
        bias, scale and minus."""
        params, known = self._params, len(self.output)
        if _penalizes(params):
            for token in self.output[self._counted :]:
                column = self._column(token)
                self._times[column] += 1
                self._penalize(self._edits, column, self._times[column])
            self._counted = known
        self._edits[1, self._stops] = -math.inf if index < params.min_tokens else self._bias_of_stops
        tokens = draft[: index - known]
        if self.in_flight(index, draft) and self._drawn is not None and self._drawn[0] == known:
            tokens = [self._drawn[1]]
        if not tokens or not _penalizes(params):
            return self._edits[:, : len(self._columns)]
        columns = [self._column(token) for token in tokens]
        edits = self._edits[:, : len(self._columns)].copy()
        for column, times in Counter(columns).items():
            self._penalize(edits, column, self._times[column] + times)
        return edits

    def in_flight(self, index: int, draft: Sequence[int] = ()) -> bool:
        """Whether the edits of output token `index` depend on a token that no step has committed yet. If the step that
        should draw it fails, it never comes, and what is drawn after it is discarded."""
        return index > len(self.output) + len(draft) and _penalizes(self._params)

    def _penalize(self, edits: NDArray[np.float64], column: int, times: int) -> None:
        params = self._params
        edits[2, column] = params.repetition_penalty
        edits[3, column] = params.presence_penalty + params.frequency_penalty * times

    def _column(self, token: int) -> int:
        """The column of a token; a new one if it has none."""
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._times):
            self._edits = np.concatenate((self._edits, np.zeros_like(self._edits)), axis=1)
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        if not self._edits[2, column]:
            self._edits[0, column], self._edits[2, column] = token, 1
        return column


class Row(NamedTuple):
    """A row of logits to edit."""

    draw: DrawRow
    edits: RequestEdits

    @property
    def in_flight(self) -> bool:
        return self.edits.in_flight(self.draw.output_index, self.draw.part.beyond)


class Penalties(Processor):
    """Edits the logits of requests with biases, penalties or min_tokens. It remembers the tokens of such a request
    as long as the request lives."""

    def __init__(self, eos_ids: Collection[int], device: str | torch.device = "cpu") -> None:
        self.eos_ids, self.device = frozenset(eos_ids), torch.device(device)
        self._edits: WeakKeyDictionary[Request, RequestEdits] = WeakKeyDictionary()

    def wants(self, params: SamplingParams) -> bool:
        return wants_edits(params)

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        rows = [
            Row(draw, self._edits_of(draw.part.request))
            for draw in draws
            if wants_edits(draw.part.request.params, draw.output_index)
        ]
        return PenaltiesWork(rows, self.device) if rows else None

    def _edits_of(self, request: Request) -> RequestEdits:
        edits = self._edits.get(request)
        if edits is None:
            edits = self._edits[request] = RequestEdits(request, self.eos_ids)
        return edits


class PenaltiesWork(Work):
    """The edits of one step."""

    def __init__(self, edited: Sequence[Row], device: torch.device) -> None:
        self.edited, self.device = edited, device

    @property
    def in_flight(self) -> bool:
        return any(row.in_flight for row in self.edited)

    def edit(self, logits: Tensor) -> Tensor:
        return edit(logits, pack_edits(self.edited, self.device))

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        """Note the drawn tokens: they count until they are committed."""
        last = None
        for (_, number, _, index), edits in self.edited:
            token = output.tokens[number]
            if token is not None and number != last:
                edits.take(index, token)
            last = number


def pack_edits(rows: Sequence[Row], device: torch.device) -> Edits:
    """The edits of these rows."""
    listed = [np.insert(edits.at(draw.output_index, draw.part.beyond), 0, draw.row, axis=0) for draw, edits in rows]
    numbers, tokens, bias, scale, minus = moved(torch.from_numpy(np.concatenate(listed, 1)), device).unbind()
    return Edits(numbers.long(), tokens.long(), bias.float(), scale.float(), minus.float())


def wants_edits(params: SamplingParams, index: int = 0) -> bool:
    """Whether the logits of output token `index` may be changed."""
    return bool(params.logit_bias or index < params.min_tokens or _penalizes(params))


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


# region exercise 2.23
def edit(logits: Tensor, edits: Edits) -> Tensor:
    """Apply logit_bias and penalties, in float32. -inf and NaN stay as they are."""
    logits, at = logits.float(), (edits.rows, edits.tokens)
    return logits.index_put(at, penalized(logits[at] + edits.bias, edits.scale, edits.minus))


def penalized(x: Tensor, scale: Tensor, minus: Tensor) -> Tensor:
    """The logits after penalties for tokens that have occurred."""
    return torch.where(x > 0, x / scale, x * scale) - minus


# endregion
