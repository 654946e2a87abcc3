"""Input and output of an engine: prompts become requests, and requests become completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.connect import check_params
from phase2_prefill_decode.model import Model

Prompt = str | Sequence[int]


class Delta(NamedTuple):
    """One token of an output, the text that it completes, and on the last one the finish reason."""

    request: Request
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    more: Any = None  # what else was asked for of it


@dataclass(slots=True)
class Completion:
    """One finished output: the request with its times, the tokens up to the one that ended it, and the text."""

    request: Request
    output_tokens: list[int] = field(default_factory=list)
    text: str = ""
    more: list[Any] = field(default_factory=list)  # what else was asked for of each token

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.token is not None:
            self.output_tokens.append(delta.token)
        if delta.more is not None:
            self.more.append(delta.more)

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
    """Make a request of each prompt. `params` is one for all, or one for each. ValueError names the first request that
    the model cannot serve."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise ValueError("prompts must be a list of texts or of lists of token ids; for a single one, a list of one")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(params)} params; give one for each, or one for all"
        )
    return [make_request(prompt, own, model, now, next(names)) for prompt, own in zip(prompts, params, strict=True)]


def make_request(
    prompt: Prompt, params: SamplingParams, model: Model, now: float, name: str, priority: int = 0, cache_salt: str = ""
) -> Request:
    """Make a request and check it against the model. max_tokens is cut to the rest of the context."""
    tokens, context = tuple(_tokens(name, prompt, model.tokenizer)), model.config.max_position_embeddings
    room = max(context - len(tokens), 1)
    if params.max_tokens > room:
        params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    request = Request(name, tokens, params, priority, now, cache_salt)
    check_params(params)
    request.check_fits(model.config.vocab_size, context, model.tokenizer is not None)
    return request


def _tokens(name: str, prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError(f"{name}: the prompt is text, and this model has no tokenizer; give token ids")
    return tokenizer.encode(prompt)
