"""What goes into an engine and what comes out: prompts become requests, events become text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from phase0_request.batch import Event
from phase0_request.detokenizer import Detokenizer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request, TokenLogprobs
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.model import Model

Prompt = str | Sequence[int]


class Delta(NamedTuple):
    """A piece of one answer: a token, the text that can be shown since, and on the last one the reason for the end."""

    request: Request
    token: int | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Completion:
    """One answer: its request, which knows its tokens, its end and its times, and what is made of them."""

    request: Request
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each output token, if they were asked for

    @property
    def output_tokens(self) -> list[int]:
        return self.request.output_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason


def make_requests(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    model: Model,
    now: float,
    names: Iterator[str],
) -> list[Request]:
    """A request for each prompt; ValueError names the first that the model cannot take. One params serves all, or
    there is one for each."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise ValueError("prompts must be a list of texts or of lists of token ids; for a single one, a list of one")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(params)} params; give one for each, or one for all"
        )
    return [make_request(prompt, one, model, now, next(names)) for prompt, one in zip(prompts, params, strict=True)]


def make_request(prompt: Prompt, params: SamplingParams, model: Model, now: float, name: str) -> Request:
    """A request that the model can serve. It ends at the latest where the model's context does."""
    tokens = _tokens(name, prompt, model.tokenizer)
    if params.stop and model.tokenizer is None:
        raise ValueError(f"{name}: stop strings are found in text, and this model has no tokenizer; use stop_token_ids")
    for token in (*tokens, *params.stop_token_ids, *dict(params.logit_bias)):
        if type(token) is int and token >= model.config.vocab_size:
            raise ValueError(f"{name}: token {token} is not of this model; its ids go to {model.config.vocab_size - 1}")
    room = model.config.max_length - len(tokens)
    if room < 1:
        raise ValueError(
            f"{name}: the prompt has {len(tokens)} tokens; at most {model.config.max_length - 1} fit into the context "
            f"of {model.config.max_length}, with one to answer"
        )
    if params.max_tokens > room:
        params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    return Request(name, tuple(tokens), params, arrival=now)


class Transcript:
    """The texts of a set of requests, as their events come."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer | None) -> None:
        self.completions: Mapping[str, Completion] = {request.id: Completion(request) for request in requests}
        self._detokenizers = {
            request.id: Detokenizer(tokenizer, request.params.stop, request.params.min_tokens)
            for request in requests
            if tokenizer is not None
        }

    def add(self, event: Event) -> Delta:
        """What the event adds to its answer. A stop string found in its text is a reason to finish, which the event
        does not know of yet."""
        request, token, reason, logprobs = event
        completion = self.completions[request.id]
        if logprobs is not None:
            completion.logprobs.append(logprobs)
        text = ""
        detokenizer = self._detokenizers.get(request.id)
        if detokenizer is not None:
            if token is not None and reason is not FinishReason.STOP:  # what ends an answer is no part of it
                text = detokenizer.push([token])
            if reason is not None:
                text += detokenizer.flush()
            if detokenizer.stopped is not None:
                if reason is FinishReason.LENGTH:
                    request.stop_after_all()
                reason = FinishReason.STOP
        completion.text += text
        return Delta(request, token, text, reason)


def _tokens(name: str, prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError(f"{name}: the prompt is text, and this model has no tokenizer; give token ids")
    return tokenizer.encode(prompt)
