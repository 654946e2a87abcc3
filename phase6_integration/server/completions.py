"""POST /v1/completions: a prompt, or several, continued."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from fastapi import Request

from phase0_request.request import TokenLogprobs
from phase6_integration.server.asking import answer_length, asks, check_lengths, check_samples, check_scores, room
from phase6_integration.server.errors import conflict
from phase6_integration.server.exchange import Exchange
from phase6_integration.server.front import Front
from phase6_integration.server.logprobs import Names, for_completion, prompt_offsets
from phase6_integration.server.protocol import CompletionRequest, Prompt
from phase6_integration.server.shape import Call, Part, Shape
from phase6_integration.server.texts import Texts

DEFAULT_MAX_TOKENS = 16  # as everywhere


async def complete(front: Front, body: CompletionRequest, request: Request) -> Exchange:
    """All that can be checked is checked before anything is tokenized; the engine is asked last."""
    front.model_name(body.model)
    given = _split(body.prompt)
    check_samples(body, len(given), front.settings.max_choices)
    if body.max_tokens == 0 and not body.echo:
        raise conflict("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to answer")
    context = front.engine.max_model_len
    prompts = await _read(front.texts, given, context)
    tokens = [prompt.tokens for prompt in prompts]
    rooms = room(tokens, answer_length(body), DEFAULT_MAX_TOKENS, context)
    prompt_logprobs = body.logprobs if body.echo else None
    if prompt_logprobs is not None:
        check_scores(body, tokens, prompt_logprobs, front.settings.max_scores)
    call = front.call("cmpl", body, request, tokens, delivers=body.max_tokens != 0)
    echoes = [await _echo(front.texts, prompt) for prompt in prompts] if body.echo else None
    shape = CompletionShape(call, front.names, body.logprobs is not None, echoes)
    return front.exchange(body, asks(body, call.id, tokens, rooms, body.logprobs, prompt_logprobs), shape)


class _Prompt(NamedTuple):
    tokens: tuple[int, ...]
    text: str | None  # None: it was given as tokens


class Echo(NamedTuple):
    """A prompt as an answer begins with it."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]


def _split(prompt: Prompt) -> list[str] | list[list[int]]:
    """A list of prompts, whichever of its four forms this one has."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [cast(list[int], prompt)]
        case _:
            return cast(list[str] | list[list[int]], prompt)


async def _read(texts: Texts, prompts: list[str] | list[list[int]], context: int) -> list[_Prompt]:
    given = [prompt for prompt in prompts if isinstance(prompt, str)]
    if given:
        check_lengths(given, texts.tokenizer.longest, context)
        return [_Prompt(*pair) for pair in zip(await texts.encode(given), given, strict=True)]
    return [_Prompt(tuple(cast(list[int], prompt)), None) for prompt in prompts]


async def _echo(texts: Texts, prompt: _Prompt) -> Echo:
    text = await texts.decode(prompt.tokens, "prompt") if prompt.text is None else prompt.text
    return Echo(text, prompt.tokens, prompt_offsets(texts.tokenizer, prompt.tokens, text))


class CompletionShape(Shape):
    object = chunk_object = "text_completion"

    def __init__(self, call: Call, names: Names, logprobs: bool, echoes: Sequence[Echo] | None) -> None:
        super().__init__(call, names, logprobs)
        self._echoes = echoes
        self._silent = set(range(len(self._parts)))  # those of which nothing was told yet, not even the prompt

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        reason, stop = part.finish_reason, None
        if not self.call.delivers:
            part, reason = Part(), reason and "length"
        elif reason == "stop":
            stop = self.answers[index].stop_reason
        text, tokens, offsets = part.text, part.tokens, part.offsets
        found: list[TokenLogprobs | None] = [*part.logprobs]
        if self._echoes is not None:
            echo = self._echoes[index // self.call.n]
            offsets = [offset + len(echo.text) for offset in offsets]
            if index in self._silent:
                text = echo.text + text
                tokens, offsets = [*echo.tokens, *tokens], [*echo.offsets, *offsets]
                found = [None, *(self.answers[index].prompt_logprobs or ()), *found]
            self._silent.discard(index)
        logprobs = for_completion(self.names, tokens, found, offsets) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    piece = choice
