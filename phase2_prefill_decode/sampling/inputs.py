"""SamplingMetadata: what the requests of one step ask of the sampler, as tensors.

A draw is a pure function of the logits, the request's seed and the token's position. There is no generator state, so no
other request of the batch can change it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.kernels.draw import SamplingTensors, signed
from phase2_prefill_decode.sampling.constraints import StepMasks, is_constrained

WIDE, NARROW = 2, 4  # parameters of 64 and of 32 bits, each a column: see `pack_params`
WORDS = 2 * WIDE + NARROW  # of 32 bits, for the parameters of a row
COLDEST = 1e-30  # smaller temperatures would be 0 in float32; at this one only the likeliest token has weight


@dataclass(frozen=True, slots=True)
class Edits:
    """The logits to change before sampling: each (row, token) once."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    bias: Tensor  # [n] float32; added first: logit_bias, or -inf for a token that min_tokens forbids
    scale: Tensor  # [n] float32; the repetition penalty, or 1
    minus: Tensor  # [n] float32; presence and frequency penalty, subtracted last
    in_flight: "InFlight | None" = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """The penalties of the newest token of some rows, where only the device knows that token.

    If such a token is among the edits of its row, its scale and minus are replaced there. If not, it gets its own.
    """

    rows: Tensor  # [m] int64
    new_scale: Tensor  # [m] float32, of a token that is not among the edits
    new_minus: Tensor
    scale: Tensor  # [n] float32, of an edit if its token is the newest of its row
    minus: Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the rows of one step ask of the sampler."""

    params: NDArray[np.int32]  # what SamplingTensors are made of, see `pack_params`
    edits: Edits | None = None
    logprobs: tuple[tuple[int, int], ...] = ()  # (row, number of alternatives)
    padding: Tensor | None = None  # [2, n] int64; (row, padded token) that a positive logit_bias makes drawable
    masks: StepMasks | None = None

    @property
    def rows(self) -> int:
        return len(self.params) // WORDS

    @property
    def is_plain(self) -> bool:
        """Whether the rows ask for nothing but a draw, as a recorded step makes it: see `asks_for_more`."""
        return self.edits is None and self.padding is None and self.masks is None and not self.logprobs


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the likeliest token (of equals the lowest id). `top_k=1` is greedy too."""
    return params.temperature == 0 or params.top_k == 1


class RequestEdits:
    """The logit changes for the next token of one request. Each token is counted once, when it is new: a step costs no
    more for a long context than for a short one of as many different tokens.

    Before `min_tokens`, tokens that would end the request are forbidden, by the rule of `batch.reason_to_finish`: with
    `ignore_eos`, end-of-sequence tokens end nothing and are allowed. The repetition penalty counts tokens of prompt and
    output, as in transformers; presence and frequency penalties count the output alone, as in OpenAI's API.
    """

    def __init__(self, request: Request, eos_ids: Collection[int], vocab_size: int) -> None:
        params, bias = request.params, dict(request.params.logit_bias)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else ()
        seen = request.prompt_tokens if params.repetition_penalty != 1 else ()
        self._params = params
        self._output = request.output_tokens
        self._counted = 0  # tokens of the output
        self._columns: dict[int, int] = {}  # of each token
        self._edits = np.zeros((4, 16))  # token, bias, scale, minus
        self._times = np.zeros(16, np.int64)  # in the output
        for token in (*bias, *(stop for stop in stops if stop < vocab_size), *seen):
            self._column(token)
        self._edits[1, [self._columns[token] for token in bias]] = [*bias.values()]
        self._edits[2, [self._columns[token] for token in {*seen}]] = params.repetition_penalty
        self._stops = [self._columns[stop] for stop in stops if stop < vocab_size]
        self._bias_of_stops = self._edits[1, self._stops]
        most = max(self._columns, default=0)
        if most >= vocab_size:
            raise ValueError(f"request {request.id} names token {most}; ids run from 0 to {vocab_size - 1}")

    def update(self, output: int) -> NDArray[np.float64]:
        """The changes after all tokens that the host knows: [4, n] of token, bias, scale and minus. The output has
        `output` tokens, those in flight included."""
        params = self._params
        counts = params.presence_penalty or params.frequency_penalty
        if _penalizes(params):
            for token in self._output[self._counted :]:
                column = self._column(token)
                self._times[column] += 1
                self._edits[2, column] = params.repetition_penalty
                if counts:
                    minus = params.presence_penalty + params.frequency_penalty * self._times[column]
                    self._edits[3, column] = minus
            self._counted = len(self._output)
        short = output < params.min_tokens
        self._edits[1, self._stops] = -math.inf if short else self._bias_of_stops
        return self._edits[:, : len(self._columns)]

    def counted_again(self) -> NDArray[np.float64]:
        """The scale and minus of each token if the output has it once more: [2, n]."""
        params, times = self._params, self._times[: len(self._columns)]
        minus = params.presence_penalty + params.frequency_penalty * (times + 1)
        return np.stack((np.full(len(times), params.repetition_penalty), minus))

    def _column(self, token: int) -> int:
        """The column of a token, a new one if it has none."""
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._times):
            self._edits = np.concatenate((self._edits, np.zeros_like(self._edits)), axis=1)
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        if not self._edits[2, column]:
            self._edits[0, column], self._edits[2, column] = token, 1
        return column


def pack_edits(
    requests: Sequence[Request],
    totals: Sequence[int],
    edits_of: Callable[[Request], RequestEdits],
    device: torch.device,
) -> Edits | None:
    """`totals` are the tokens of the requests, those in flight included."""
    parts, again, newest = [], [], []
    for row, (request, total) in enumerate(zip(requests, totals, strict=True)):
        output, params = total - len(request.prompt_tokens), request.params
        if not _wants_edits(params, output):
            continue
        edits = edits_of(request)
        parts.append(np.insert(edits.update(output), 0, row, axis=0))
        again.append(edits.counted_again())
        if total > request.total and _penalizes(params):
            newest.append((row, params.repetition_penalty, params.presence_penalty + params.frequency_penalty))
    if not newest and not sum(part.size for part in parts):
        return None
    rows, tokens, bias, scale, minus = moved(torch.from_numpy(np.concatenate(parts, 1)), device).unbind()
    in_flight = None
    if newest:
        new_rows, new_scale, new_minus = to_device(list(zip(*newest, strict=True)), torch.float64, device).unbind()
        next_scale, next_minus = moved(torch.from_numpy(np.concatenate(again, 1)), device).float().unbind()
        in_flight = InFlight(new_rows.long(), new_scale.float(), new_minus.float(), next_scale, next_minus)
    return Edits(rows.long(), tokens.long(), bias.float(), scale.float(), minus.float(), in_flight)


def pack_padding(requests: Sequence[Request], num_tokens: int, device: torch.device) -> Tensor | None:
    """The padded tokens, from id num_tokens on, that requests raise by a positive logit_bias."""
    raised = [
        (row, token)
        for row, request in enumerate(requests)
        for token, bias in dict(request.params.logit_bias).items()
        if token >= num_tokens and bias > 0
    ]
    return to_device(list(zip(*raised, strict=True)), torch.int64, device) if raised else None


def pack_params(requests: Sequence[Request], totals: Sequence[int], key: Callable[[Request], int]) -> NDArray[np.int32]:
    """The parameters of each request, in one array. `key` is a request's seed. `totals` are the positions to draw."""
    params = [request.params for request in requests]
    columns = (
        np.array([signed(key(request)) for request in requests], np.int64),
        np.array(totals, np.int64),
        np.array([0 if is_greedy(of) else max(of.temperature, COLDEST) for of in params], np.float32),
        np.array([of.top_p for of in params], np.float32),
        np.array([of.min_p for of in params], np.float32),
        np.array([of.top_k for of in params], np.int32),
    )
    return np.concatenate([column.view(np.int32) for column in columns])


def positions_in(params: NDArray[np.int32]) -> NDArray[np.int64]:
    """The second column of that array, as a view."""
    positions: NDArray[np.int64] = _split(params)[0].view(np.int64)[1]
    return positions


def pad_params(params: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """That array with more rows, which are greedy."""
    padded = np.zeros(WORDS * size, np.int32)
    for more, columns in zip(_split(padded), _split(params), strict=True):
        more[:, : columns.shape[1]] = columns
    return padded


def _split(params: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The columns of 64 and of 32 bits of that array, as views."""
    wide = 2 * WIDE * (len(params) // WORDS)
    return params[:wide].reshape(WIDE, -1), params[wide:].reshape(NARROW, -1)


def sampling_tensors(params: Tensor) -> SamplingTensors:
    """The parts of that array on the device, as views."""
    rows = len(params) // WORDS
    params = params if rows else params.new_empty(0)  # an empty slice may have a stride of 0
    wide, narrow = params.split_with_sizes([2 * WIDE * rows, NARROW * rows])
    keys, positions = wide.view(torch.int64).view(WIDE, rows).unbind()
    temperatures, top_p, min_p, top_k = narrow.view(NARROW, rows).unbind()
    temperatures, top_p, min_p = (of.view(torch.float32) for of in (temperatures, top_p, min_p))
    return SamplingTensors(temperatures, top_p, min_p, top_k, keys, positions)


def asks_for_more(params: SamplingParams) -> bool:
    """Whether a request may ever need more than a draw: edits, a mask, or log-probabilities. If none of a step's
    requests does, its metadata is plain."""
    return params.logprobs is not None or _wants_edits(params, 0) or is_constrained(params)


def _wants_edits(params: SamplingParams, output: int) -> bool:
    return bool(params.logit_bias or output < params.min_tokens or _penalizes(params))


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def to_device(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return moved(torch.tensor(numbers, dtype=dtype), device)


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for pending work of the device."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """In pinned memory, for a GPU to copy from while the host goes on."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def key_of(name: str, entropy: bytes) -> int:
    """A key for a request without a seed: the same for one request id and one entropy, in every process."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=entropy).digest(), "big")
