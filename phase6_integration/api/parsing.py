"""Request parsing: from a validated body to the message that the engine gets."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from phase0_request.params import MAX_BAD_WORD, SamplingParams
from phase6_integration.api.errors import unavailable, unservable
from phase6_integration.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from phase6_integration.api.state import ServerState
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest

_DERIVED = {"max_tokens", "min_tokens", "logit_bias", "bad_words", "logprobs", "prompt_logprobs"}  # below
_COPIED = [field.name for field in fields(SamplingParams) if field.name in {*SamplingFields.model_fields} - _DERIVED]
MAX_SCORES = 1 << 20  # logprobs of the prompts of a request, alternatives included
BY_KEY = "key-"  # ids of clients with an API key begin with it
_serial = itertools.count()  # makes ids unique, since a client may give two requests the same one


def requested_length(request: CompletionRequest | ChatRequest, context: int, clip: bool) -> int | None:
    """The output length that the client has set, if any. With `clip` it may be more than there is room for."""
    given = {name: getattr(request, name, None) for name in ("max_completion_tokens", "max_tokens")}
    asked = {name: length for name, length in given.items() if length is not None}
    for name, length in asked.items():
        if length > context and not clip:
            message = f"{name} may be at most {context}, the context of this model, got {length}"
            raise unservable(name, message, "context_length_exceeded")
    if len({*asked.values()}) > 1:
        raise unservable("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    return next(iter(asked.values()), None)


def check_lengths(texts: Iterable[str], longest: int, context: int, param: str = "prompt") -> None:
    """Refuse a text that is too long even if every token were the longest of the vocabulary. Tokenizing millions of
    characters would take seconds."""
    most = context * longest
    for text in texts:
        if len(text) > most:
            message = f"this model's maximum context length is {context} tokens, {most} characters at the very most, "
            raise unservable(param, f"{message}got {len(text)}", "context_length_exceeded")


def truncate(prompt: Sequence[int], request: SamplingFields, length: int, context: int) -> tuple[int, ...]:
    """The tokens at the end of a prompt that the request keeps; -1: as many as fit beside `length` tokens of output."""
    keep, most = request.truncate_prompt_tokens, max(context - max(length, 1), 1)
    if keep is not None and keep > most:
        message = f"truncate_prompt_tokens: with {length} for the answer, a prompt may keep {most}, got {keep}"
        raise unservable("truncate_prompt_tokens", message, "context_length_exceeded")
    return tuple(prompt if keep is None else prompt[max(len(prompt) - (most if keep < 0 else keep), 0) :])


def output_lengths(
    prompts: Sequence[Sequence[int]],
    requested: int | None,
    default: int | None,
    context: int,
    clip: bool,
    param: str = "prompt",
) -> list[int]:
    """max_tokens of each prompt. A requested length must fit into the context, or with `clip` is cut to fit, as the
    default is; None means the rest of the context."""
    lengths = []
    for prompt in prompts:
        if not prompt:
            raise unservable(param, f"the {param} came to no tokens; at least one is needed", "empty_prompt")
        limit, left = f"this model's maximum context length is {context} tokens", context - len(prompt)
        if left < 1:
            message = f"{limit} and the prompt has {len(prompt)}; leave room for at least one more"
            raise unservable(param, message, "context_length_exceeded")
        if requested is not None and requested > left and not clip:
            message = f"{limit}; {len(prompt)} in the prompt and {requested} for the answer are too many"
            raise unservable(param, message, "context_length_exceeded")
        lengths.append(min(left, default or left) if requested is None else min(left, requested))
    return lengths


def check_options(server: ServerState, request: SamplingFields, prompts: int, most: int | None = None) -> None:
    """Check what fields mean together, and that the engine is ready, before anything is tokenized or copied n times.
    `most` prompts are allowed, or as many choices as the server is set to."""
    server.model_name(request.model)
    settings, n, policy = server.settings, request.n or 1, server.engine.options.scheduling_policy
    limit = most or settings.max_choices
    if n * prompts > limit:
        raise unservable("n" if n > 1 else "prompt", f"n x prompts may be at most {limit}, got {n} x {prompts}")
    if request.best_of not in (None, n):
        raise unservable("best_of", f"best_of can only be as n, which is {n}, got {request.best_of}")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        asked = getattr(request, name, None)
        if type(asked) is int and asked > settings.max_logprobs:
            raise unservable(name, f"{name} may be at most {settings.max_logprobs} on this server, got {asked}")
    if request.stream_options is not None and not request.stream:
        raise unservable("stream_options", "stream_options are for streams; set stream to true")
    if request.prompt_logprobs is not None and request.stream:
        raise unservable("prompt_logprobs", "a stream has no prompt_logprobs; set stream to false")
    if request.priority and policy != "priority":
        message = f"this server schedules by {policy}; priorities need --scheduling-policy priority"
        raise unservable("priority", message)
    if server.engine.health is not Health.READY:
        raise unavailable(server.engine.health)


def prompt_alternatives(request: SamplingFields, prompts: Sequence[Sequence[int]], echoed: int | None) -> int | None:
    """The number of alternatives that the engine finds for prompt tokens: the most that `prompt_logprobs` and an echo
    with logprobs need. All of them exist after one step, so that without a limit a small request could cause a huge
    response."""
    asked = {"prompt_logprobs": request.prompt_logprobs, "logprobs": echoed}
    given = {name: number for name, number in asked.items() if number is not None}
    if not given:
        return None
    most = max(given.values())
    n, tokens = request.n or 1, sum(map(len, prompts))
    if n * tokens * (1 + most) > MAX_SCORES:
        message = f"a prompt may have {MAX_SCORES} logprobs, alternatives included, got {n} x {tokens} x {1 + most}"
        raise unservable(next(iter(given)), message)
    return most


def excluding_fields(request: SamplingFields) -> list[str]:
    """The fields of a request that exclude tokens from its answer, without those of its grammar."""
    found = [name for name in ("allowed_token_ids", "bad_words") if getattr(request, name)]
    if request.min_tokens:
        found += ["min_tokens", *(["stop_token_ids"] if request.stop_token_ids else [])]
    return found


async def bad_words(pool: TokenizerPool, request: SamplingFields, tenant: str) -> list[tuple[int, ...]]:
    """The tokens of each word in two forms: at the start of a text, and after a space, where it mostly is another."""
    texts: list[str] = []
    for word in request.bad_words or ():
        bare = word.lstrip(" ")
        texts += (bare, f" {bare}") if bare else (word,)
    if not texts:
        return []
    found = dict.fromkeys(await pool.encode(texts, tenant, add_special_tokens=False))
    if not all(1 <= len(tokens) <= MAX_BAD_WORD for tokens in found):
        raise unservable("bad_words", f"each of bad_words must be 1 to {MAX_BAD_WORD} tokens of this model")
    return list(found)


async def engine_request(
    server: ServerState,
    tenant: str,
    request: CompletionRequest | ChatRequest,
    id: str,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    **found: Any,
) -> EngineRequest:
    """The message to the engine. `found` are fields of SamplingParams that are more than a copy of the request's."""
    if request.min_tokens and found.get("grammar") is not None:
        raise unservable("min_tokens", "min_tokens: with a grammar or required calls, an answer ends when complete")
    settings, words = server.settings, await bad_words(server.tokenizers, request, tenant)
    return EngineRequest(
        f"{id}-{next(_serial)}",
        list(prompts),
        sampling_params(request, lengths, settings.sampling_defaults, {**found, "bad_words": words}),
        [max(length, 1) for length in lengths],
        request.n or 1,
        request.priority or 0,
        cache_salt(tenant, request.cache_salt or ""),
        settings.request_timeout or None,
        tenant,
    )


def cache_salt(tenant: str, given: str) -> str:
    """The salt that a client gave; for a client with an API key, a salt that no other client can give. Otherwise a
    client could learn what another has sent, by `cached_tokens` or by the time to the first token."""
    if not tenant.startswith(BY_KEY):
        return given
    return blake2b(given.encode(), key=tenant.encode()).hexdigest()


def sampling_params(
    request: SamplingFields, lengths: Sequence[int], defaults: Mapping[str, Any], found: Mapping[str, Any]
) -> SamplingParams:
    """The fields that are given, over the defaults of the model, for the shortest of these lengths."""
    length = min(lengths)
    given = {**defaults} | {name: value for name in _COPIED if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.min_tokens and request.min_tokens > max(length, 1):
        raise unservable(
            "min_tokens", f"min_tokens must be at most the {length} tokens of the answer, got {request.min_tokens}"
        )
    given |= {"max_tokens": max(length, 1), "min_tokens": request.min_tokens or 0}
    return SamplingParams(**{**given, **found})
