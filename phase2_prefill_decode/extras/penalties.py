"""Logit edits: logit_bias, min_tokens, and penalties of tokens that have occurred.

The host lists the edits of a step, and the device applies them. With a token in flight they are listed when the step
that draws it has ended, while the device already runs the model for the next one.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.transfer import moved


class Edits(NamedTuple):
    """The logits to change before sampling: each (row, token) once."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    bias: Tensor  # [n] float32; added first: logit_bias, or -inf for a token that min_tokens forbids
    scale: Tensor  # [n] float32; the repetition penalty, or 1
    minus: Tensor  # [n] float32; presence and frequency penalty, subtracted last


class RequestEdits:
    """The logit changes for the next token of one request. Each token is counted once, when it is new: a step costs no
    more for a long context than for a short one of as many different tokens.

    Before `min_tokens`, tokens that would end the request are forbidden, by the rule of `batch.reason_to_finish`: with
    `ignore_eos`, end-of-sequence tokens end nothing and are allowed. The repetition penalty counts tokens of prompt and
    output, as in transformers; presence and frequency penalties count the output alone, as in OpenAI's API.
    """

    def __init__(self, request: Request, eos_ids: Collection[int]) -> None:
        params, bias = request.params, dict(request.params.logit_bias)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else ()
        seen = request.prompt_tokens if params.repetition_penalty != 1 else ()
        self.output: Sequence[int] = request.output_tokens  # committed
        self.draft: Sequence[int] = request.draft  # after them
        self._params = params
        self._counted = 0  # tokens of the output
        self._drawn: tuple[int, int] | None = None  # the latest token and its index; it may not be committed yet
        self._columns: dict[int, int] = {}  # of each token
        self._edits = np.zeros((4, 16))  # token, bias, scale, minus
        self._times = np.zeros(16, np.int64)  # in the output
        for token in (*bias, *stops, *seen):
            self._column(token)
        self._edits[1, [self._columns[token] for token in bias]] = [*bias.values()]
        self._edits[2, [self._columns[token] for token in {*seen}]] = params.repetition_penalty
        self._stops = [self._columns[stop] for stop in stops]
        self._bias_of_stops = self._edits[1, self._stops]

    def take(self, index: int, token: int) -> None:
        """Note that output token `index` was drawn. It counts until it is committed, or another one is drawn there."""
        self._drawn = index, token

    def at(self, index: int) -> NDArray[np.float64]:
        """The changes where output token `index` is to be drawn: [4, n] of token, bias, scale and minus."""
        params, known = self._params, len(self.output)
        if _penalizes(params):
            for token in self.output[self._counted :]:
                column = self._column(token)
                self._times[column] += 1
                self._penalize(self._edits, column, self._times[column])
            self._counted = known
        self._edits[1, self._stops] = -math.inf if index < params.min_tokens else self._bias_of_stops
        tokens = self.draft[: index - known]
        if self.in_flight(index) and self._drawn is not None and self._drawn[0] == known:
            tokens = [self._drawn[1]]
        if not tokens or not _penalizes(params):
            return self._edits[:, : len(self._columns)]
        columns = [self._column(token) for token in tokens]
        edits = self._edits[:, : len(self._columns)].copy()
        for column, times in Counter(columns).items():
            self._penalize(edits, column, self._times[column] + times)
        return edits

    def in_flight(self, index: int) -> bool:
        """Whether the edits of output token `index` depend on a token that no step has committed yet. If the step that
        should draw it fails, it never comes, and what is drawn after it is discarded."""
        return index > len(self.output) + len(self.draft) and _penalizes(self._params)

    def _penalize(self, edits: NDArray[np.float64], column: int, times: int) -> None:
        params = self._params
        edits[2, column] = params.repetition_penalty
        edits[3, column] = params.presence_penalty + params.frequency_penalty * times

    def _column(self, token: int) -> int:
        """The column of a token, a new one if it has none."""
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._times):
            self._edits = np.concatenate((self._edits, np.zeros_like(self._edits)), axis=1)
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        if not self._edits[2, column]:
            self._edits[0, column], self._edits[2, column] = token, 1
        return column


def pack_edits(rows: Sequence[tuple[int, RequestEdits, int]], device: torch.device) -> Edits:
    """The edits of these rows: each with what it edits, and which output token it draws."""
    listed = [np.insert(edits.at(index), 0, row, axis=0) for row, edits, index in rows]
    numbers, tokens, bias, scale, minus = moved(torch.from_numpy(np.concatenate(listed, 1)), device).unbind()
    return Edits(numbers.long(), tokens.long(), bias.float(), scale.float(), minus.float())


def wants_edits(params: SamplingParams, index: int = 0) -> bool:
    """Whether the logits of output token `index` may be changed."""
    return bool(params.logit_bias or index < params.min_tokens or _penalizes(params))


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


# region exercise 2.11
def edit(logits: Tensor, edits: Edits) -> Tensor:
    """Apply logit_bias and penalties, in float32. -inf and NaN stay as they are."""
    logits, at = logits.float(), (edits.rows, edits.tokens)
    return logits.index_put(at, penalized(logits[at] + edits.bias, edits.scale, edits.minus))


def penalized(x: Tensor, scale: Tensor, minus: Tensor) -> Tensor:
    """Logits with the penalties of tokens that have occurred."""
    return torch.where(x > 0, x / scale, x * scale) - minus


# endregion
