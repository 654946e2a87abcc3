"""Asking: a request as the engine takes it. A prompt answered n times is n asks."""

import itertools
from collections.abc import Iterable, Sequence

from phase0_request.params import SamplingParams
from phase6_integration.answers import Ask
from phase6_integration.server.errors import conflict
from phase6_integration.server.protocol import ChatRequest, CompletionRequest, Sampled

_SAME = (  # what SamplingParams call by the same name
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_serial = itertools.count()  # a client may give two live requests one id; the engine may not be given it twice


def answer_length(request: CompletionRequest | ChatRequest) -> int | None:
    """How many tokens the client itself asks for; None if it leaves that to us."""
    asked = request.max_tokens
    if isinstance(request, CompletionRequest) or request.max_completion_tokens is None:
        return asked
    if asked is not None and asked != request.max_completion_tokens:
        raise conflict("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    return request.max_completion_tokens


def check_lengths(texts: Iterable[str], longest: int, context: int, param: str = "prompt") -> None:
    """Before a text is split into tokens, which takes seconds for millions of characters: that it is not too long even
    if it should fall into the longest tokens that there are."""
    most = context * longest
    for text in texts:
        if len(text) > most:
            message = f"the context of this model is {context} tokens, {most} characters at the very most, "
            raise conflict(param, f"{message}got {len(text)}", "context_length_exceeded")


def room(
    prompts: Sequence[Sequence[int]], asked: int | None, default: int | None, context: int, param: str = "prompt"
) -> list[int]:
    """How many tokens each answer may have. What was asked for must fit; the default is cut to fit, None is all."""
    rooms = []
    for prompt in prompts:
        if not prompt:
            raise conflict(param, f"the {param} came to no tokens; at least one is needed", "empty_prompt")
        limit, left = f"the context of this model is {context} tokens", context - len(prompt)
        if left < 1:
            message = f"{limit} and the prompt has {len(prompt)}; leave room for at least one more"
            raise conflict(param, message, "context_length_exceeded")
        if asked is not None and asked > left:
            message = f"{limit}; {len(prompt)} in the prompt and {asked} for the answer are too many"
            raise conflict(param, message, "context_length_exceeded")
        rooms.append(min(left, default or left) if asked is None else asked)
    return rooms


def check_samples(request: Sampled, prompts: int, limit: int) -> None:
    """That n x prompts is not too many: before anything is made n times."""
    n = request.n or 1
    if n * prompts > limit:
        raise conflict("n", f"n x prompts may be at most {limit}, got {n} x {prompts}")


def check_scores(request: Sampled, prompts: Sequence[Sequence[int]], logprobs: int, limit: int) -> None:
    """That not too much is to be told of prompts: of each token itself and its alternatives, in each answer. It is
    there after one step, so nothing but this keeps a small request from a huge response."""
    n, tokens = request.n or 1, sum(map(len, prompts))
    if n * tokens * (1 + logprobs) > limit:
        message = f"echo with logprobs may tell of {limit} tokens and alternatives, got {n} x {tokens} x {1 + logprobs}"
        raise conflict("logprobs", message)


def asks(
    request: CompletionRequest | ChatRequest,
    id: str,
    prompts: Sequence[tuple[int, ...]],
    rooms: Sequence[int],
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> list[Ask]:
    """In the order of the choices: prompt by prompt, sample by sample."""
    name, n = f"{id}-{next(_serial)}", request.n or 1
    return [
        Ask(
            f"{name}-{p * n + sample}",
            prompt,
            params(request, length, sample, logprobs, prompt_logprobs),
            request.priority or 0,
            request.cache_salt or "",
        )
        for p, (prompt, length) in enumerate(zip(prompts, rooms, strict=True))
        for sample in range(n)
    ]


def params(
    request: Sampled, length: int, sample: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """What is not given is left to the defaults of SamplingParams. A seed is followed by those after it."""
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.seed is not None:
        given["seed"] = _after(request.seed, sample)
    if request.min_tokens and request.min_tokens > max(length, 1):
        raise conflict(
            "min_tokens", f"min_tokens must be at most the {length} tokens of the answer, got {request.min_tokens}"
        )
    return SamplingParams(
        max_tokens=max(length, 1),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **given,
    )


def _after(seed: int, sample: int) -> int:
    return (seed + sample + (1 << 63)) % (1 << 64) - (1 << 63)
