"""Request parsing: the checks of a validated body, and the message that the engine gets."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from phase0_request.params import SamplingParams
from phase6_integration.api.additions import Asked, Prepare
from phase6_integration.api.errors import unavailable, unservable
from phase6_integration.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from phase6_integration.api.state import ServerState
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest

# The fields of SamplingParams that a body has under the same name.
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
BY_KEY = "key-"  # ids of clients with an API key begin with it
_serial = itertools.count()  # makes ids unique, since a client may give two requests the same one


def check_body(server: ServerState, body: SamplingFields, prompts: int, most: int | None = None) -> list[Prepare]:
    """Check what fields mean together, and that the engine is ready, before anything is tokenized or copied n times.
    At most `most` prompts are allowed, or `max_choices` of the settings. Returns the preparations of the features."""
    server.model_name(body.model)
    n, policy = body.n or 1, server.engine.options.scheduling_policy
    limit = most or server.settings.max_choices
    if n * prompts > limit:
        raise unservable("n" if n > 1 else "prompt", f"n x prompts may be at most {limit}, got {n} x {prompts}")
    if body.stream_options is not None and not body.stream:
        raise unservable("stream_options", "stream_options are for streams; set stream to true")
    if body.priority and policy != "priority":
        message = f"this server schedules by {policy}; priorities need --scheduling-policy priority"
        raise unservable("priority", message)
    if server.engine.health is not Health.READY:
        raise unavailable(server.engine.health)
    return [prepare for feature in server.features if (prepare := feature(body)) is not None]


def requested_length(server: ServerState, body: CompletionRequest | ChatRequest) -> int | None:
    """The output length that the client has set, if any. A server that clips accepts more than there is room for."""
    given = {name: getattr(body, name, None) for name in ("max_completion_tokens", "max_tokens")}
    asked, context = {name: length for name, length in given.items() if length is not None}, server.engine.max_model_len
    for name, length in asked.items():
        if length > context and not server.settings.clip_max_tokens:
            message = f"{name} may be at most {context}, the context of this model, got {length}"
            raise unservable(name, message, "context_length_exceeded")
    if len({*asked.values()}) > 1:
        raise unservable("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    return next(iter(asked.values()), None)


def check_characters(server: ServerState, texts: Iterable[str], param: str = "prompt") -> None:
    """Refuse a text that is too long even if every token were the longest of the vocabulary. Tokenizing millions of
    characters would take seconds."""
    context = server.engine.max_model_len
    most = context * server.tokenizers.tokenizer.longest
    for text in texts:
        if len(text) > most:
            message = f"this model's maximum context length is {context} tokens, {most} characters at the very most, "
            raise unservable(param, f"{message}got {len(text)}", "context_length_exceeded")


def truncate(server: ServerState, prompt: Sequence[int], body: SamplingFields, length: int) -> tuple[int, ...]:
    """The last tokens of a prompt that the request keeps; -1: as many as leave room for `length` tokens of output."""
    keep, most = body.truncate_prompt_tokens, max(server.engine.max_model_len - max(length, 1), 1)
    if keep is not None and keep > most:
        message = f"truncate_prompt_tokens: with {length} for the answer, a prompt may keep {most}, got {keep}"
        raise unservable("truncate_prompt_tokens", message, "context_length_exceeded")
    return tuple(prompt if keep is None else prompt[max(len(prompt) - (most if keep < 0 else keep), 0) :])


def output_length(
    server: ServerState, prompt: Sequence[int], requested: int | None, default: int | None, param: str = "prompt"
) -> int:
    """max_tokens of a prompt. A requested length must fit into the context, or on a server that clips is cut to fit, as
    the default is; None means the rest of the context."""
    if not prompt:
        raise unservable(param, f"the {param} came to no tokens; at least one is needed", "empty_prompt")
    context = server.engine.max_model_len
    limit, left = f"this model's maximum context length is {context} tokens", context - len(prompt)
    if left < 1:
        message = f"{limit} and the prompt has {len(prompt)}; leave room for at least one more"
        raise unservable(param, message, "context_length_exceeded")
    if requested is not None and requested > left and not server.settings.clip_max_tokens:
        message = f"{limit}; {len(prompt)} in the prompt and {requested} for the answer are too many"
        raise unservable(param, message, "context_length_exceeded")
    return min(left, default or left) if requested is None else min(left, requested)


def engine_request(server: ServerState, asked: Asked, id: str) -> EngineRequest:
    """The message to the engine."""
    body, settings = asked.body, server.settings
    lengths = [max(length, 1) for length in asked.lengths]  # an answer of none is made of one, which is not sent
    return EngineRequest(
        f"{id}-{next(_serial)}",
        list(asked.prompts),
        sampling_params(body, min(lengths), settings.sampling_defaults, asked.params),
        lengths,
        body.n or 1,
        body.priority or 0,
        cache_salt(asked.client, body.cache_salt or ""),
        settings.request_timeout or None,
        asked.client,
    )


def cache_salt(client: str, given: str) -> str:
    """The salt that a client gave; for a client with an API key, a salt that no other client can give. Otherwise a
    client could learn what another has sent, by `cached_tokens` or by the time to the first token."""
    if not client.startswith(BY_KEY):
        return given
    return blake2b(given.encode(), key=client.encode()).hexdigest()


def sampling_params(
    body: SamplingFields, max_tokens: int, defaults: Mapping[str, Any], more: Mapping[str, Any]
) -> SamplingParams:
    """The model's defaults, overridden by the given fields and the features' fields."""
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, **more})
