"""Sampling: what the rows of one step ask, as tensors, and only what is asked. Packed on the host from the requests."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.draws import uniform
from phase2_prefill_decode.filters import Ask

COLDEST = 1e-30  # a temperature below it would be 0 in float32; long before, only the likeliest token is left


@dataclass(frozen=True, slots=True)
class Edits:
    """Logits to change before anything is drawn: each (row, token) once."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    bias: Tensor  # [n] float32; added first: logit_bias, or -inf for a token that may not come yet
    scale: Tensor  # [n] float32; the repetition penalty, or 1
    minus: Tensor  # [n] float32; presence and frequency penalty, taken off last


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that draw; all others take the likeliest token."""

    rows: Tensor | None  # [n] int64; None: every row draws
    uniforms: Tensor  # [n] float64
    temperatures: Tensor  # [n] float32
    min_p: Ask | None  # the rows of an Ask are numbered among those that draw
    top_k: Ask | None
    top_p: Ask | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What each of so many rows of logits asks. Rows that ask for nothing cost nothing."""

    rows: int
    edits: Edits | None = None
    draws: Draws | None = None
    logprobs: tuple[tuple[int, int], ...] = ()  # (row, how many alternatives)


def is_greedy(params: SamplingParams) -> bool:
    """Whether a request takes the likeliest token, the first of several; `top_k=1` asks for just that."""
    return params.temperature == 0 or params.top_k == 1


def edits_of(request: Request, eos_ids: Collection[int], vocab_size: int) -> NDArray[np.float64]:
    """The logits that a request wants changed for its next token: [4, n] of token, bias, scale and minus.

    While fewer than `min_tokens` are out, no token may come that would end the request, by the same rule as in
    `events.reason_to_finish`: with `ignore_eos` an end-of-sequence token ends nothing, so it may come. The repetition
    penalty is for tokens of prompt and output, as in transformers; the other two are for the output alone, as OpenAI
    defines them.
    """
    params, output = request.params, request.output_tokens
    bias = dict(params.logit_bias)
    if len(output) < params.min_tokens:
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        bias |= dict.fromkeys((token for token in stops if token < vocab_size), -math.inf)
    counted = output if params.presence_penalty or params.frequency_penalty else []
    said, times = np.unique(np.array(counted, np.int64), return_counts=True)
    seen = np.array([*request.prompt_tokens, *output] if params.repetition_penalty != 1 else [], np.int64)
    tokens = np.unique(np.concatenate((np.array([*bias], np.int64), said, seen)))
    edits = np.zeros((4, len(tokens)))
    edits[0], edits[2] = tokens, 1
    edits[1, tokens.searchsorted([*bias])] = [*bias.values()]
    edits[2, tokens.searchsorted(seen)] = params.repetition_penalty
    edits[3, tokens.searchsorted(said)] = params.presence_penalty + params.frequency_penalty * times
    return edits


def pack_edits(
    requests: Sequence[Request], eos_ids: Collection[int], vocab_size: int, device: torch.device
) -> Edits | None:
    parts = []
    for row, request in enumerate(requests):
        if _wants_edits(request):
            edits = edits_of(request, eos_ids, vocab_size)
            most = int(edits[0].max(initial=0))
            if most >= vocab_size:
                raise ValueError(f"request {request.id} names token {most}; ids run from 0 to {vocab_size - 1}")
            parts.append(np.insert(edits, 0, row, axis=0))
    if not sum(part.size for part in parts):
        return None
    rows, tokens, bias, scale, minus = _moved(torch.from_numpy(np.concatenate(parts, 1)), device).unbind()
    return Edits(rows.long(), tokens.long(), bias.float(), scale.float(), minus.float())


def pack_draws(
    requests: Sequence[Request], key: Callable[[Request], int], vocab_size: int, device: torch.device
) -> Draws | None:
    """`key` is the half of a request's luck that stays the same; its length so far is the other."""
    table = []
    for row, request in enumerate(requests):
        params = request.params
        if not is_greedy(params):
            luck = uniform(key(request), request.total)
            k = params.top_k if 0 < params.top_k < vocab_size else 0
            table.append((row, luck, max(params.temperature, COLDEST), params.min_p, k, params.top_p))
    if not table:
        return None
    rows, uniforms, temperatures, *filters = _columns(table, device)
    min_p, top_k, top_p = (
        _ask([line[column] for line in table], off, values)
        for column, off, values in zip((3, 4, 5), (0, 0, 1), filters, strict=True)
    )
    every = len(table) == len(requests)
    return Draws(None if every else rows.long(), uniforms, temperatures.float(), min_p, top_k, top_p)


def _wants_edits(request: Request) -> bool:
    params = request.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or len(request.output_tokens) < params.min_tokens
    )


def _ask(values: Sequence[float], off: float, column: Tensor) -> Ask | None:
    """`column` has the values on the device."""
    rows = [row for row, value in enumerate(values) if value != off]
    if not rows:
        return None
    if len(rows) == len(values):
        return Ask(None, column, max(values))
    index = to_device(rows, torch.int64, column.device)
    return Ask(index, column[index], max(values[row] for row in rows))


def _columns(table: Sequence[Sequence[float]], device: torch.device) -> tuple[Tensor, ...]:
    """A table of numbers on the device, in one copy. Token ids pass through float64 unharmed."""
    return to_device(list(zip(*table, strict=True)), torch.float64, device).unbind()


def to_device(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _moved(torch.tensor(numbers, dtype=dtype), device)


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device has still to do, which takes memory that a GPU can read by itself."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
