"""Requests and logits for the tests of the Sampler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phase0_request import Request, SamplingParams, StepOutput
from phase2_prefill_decode.extras.penalties import edit, pack_edits
from phase2_prefill_decode.sampling.metadata import SamplingMetadata
from phase2_prefill_decode.sampling.sampler import Sampler
from tests.phase2_prefill_decode.steps import output_of

VOCAB = 30


def request_of(id: str = "r", prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(id, tuple(prompt), SamplingParams(**params))
    request.output_tokens += output
    return request


def run(sampler: Sampler, logits: Tensor, requests: Sequence[Request]) -> StepOutput:
    sampling = sampler.pack(requests)
    sampled = sampler.sample(logits.to(sampler.device), sampling)
    return output_of(sampled, sampling, range(len(requests)), len(requests))


def edited(logits: Tensor, requests: Sequence[Request], eos_ids: Sequence[int] = ()) -> Tensor:
    return edited_by(Sampler(eos_ids, logits.shape[1]).pack(requests), logits)


def edited_by(sampling: SamplingMetadata, logits: Tensor) -> Tensor:
    edits = pack_edits(sampling.edits, logits.device) if sampling.edits else None
    return logits if edits is None else edit(logits, edits)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
