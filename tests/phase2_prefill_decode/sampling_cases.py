"""Requests and logits for the tests of the Sampler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phase0_request import Batch, Request, SamplingParams, Slice, StepOutput, TokenLogprobs
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.outcome import SliceOutcome
from phase2_prefill_decode.extras.penalties import PenaltiesWork, Row
from phase2_prefill_decode.extras.processors import processors_for
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.sampling.sampler import Sampler
from tests.phase2_prefill_decode.steps import Asked, output_of

VOCAB = 30


def request_of(id: str = "r", prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(id, tuple(prompt), SamplingParams(**params))
    request.output_tokens += output
    return request


def sampler_of(
    eos_ids: Sequence[int],
    vocab_size: int,
    device: str | torch.device = "cpu",
    seed: int | None = None,
    *,
    num_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Sampler:
    """A sampler with all that requests may ask for."""
    place = torch.device(device)
    processors = processors_for(vocab_size, eos_ids, place, tokenizer, lambda hidden: hidden)
    return Sampler(vocab_size, seed, num_tokens=num_tokens, processors=processors, draw=backend_for(place).draw)


def packed(sampler: Sampler, requests: Sequence[Request], totals: Sequence[int] | None = None) -> Asked:
    """What a step asks in which each of these requests draws its next token. `totals` count those in flight."""
    totals = [request.total for request in requests] if totals is None else totals
    slices = tuple(Slice(r, total - 1, 1) for r, total in zip(requests, totals, strict=True))
    return Asked(*sampler.pack(Batch(slices)))


def logprobs_in(output: StepOutput) -> dict[int, TokenLogprobs]:
    """Those of the drawn tokens, by slice."""
    return {n: o.logprobs for n, o in output.more.items() if isinstance(o, SliceOutcome) and o.logprobs is not None}


def edits_in(sampling: Asked) -> Sequence[Row]:
    """The rows with edits."""
    return [row for work in sampling.works if isinstance(work, PenaltiesWork) for row in work.edited]


def sampled(sampler: Sampler, logits: Tensor, sampling: Asked) -> tuple[Tensor, Tensor]:
    """Draw, and collect what is asked for beside."""
    inputs = SamplingInputs(*(torch.from_numpy(column).to(logits.device) for column in sampling.columns))
    tokens, peaks = sampler.sample(logits, inputs, sampling.works)
    for work in sampling.works:
        work.collect(logits, tokens, logits[:0])
    return tokens, peaks


def run(sampler: Sampler, logits: Tensor, requests: Sequence[Request]) -> StepOutput:
    sampling = packed(sampler, requests)
    found = sampled(sampler, logits, sampling)
    return output_of(found, sampling.works, range(len(requests)), len(requests))


def edited(logits: Tensor, requests: Sequence[Request], eos_ids: Sequence[int] = ()) -> Tensor:
    return edited_by(packed(sampler_of(eos_ids, logits.shape[1]), requests), logits)


def edited_by(sampling: Asked, logits: Tensor) -> Tensor:
    for work in sampling.works:
        logits = work.edit(logits)
    return logits


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
