"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, cast

from fastapi import APIRouter, Request, Response

from phase0_request.request import FinishReason
from phase6_integration.outputs import Chunk, LogprobArrays
from phase6_integration.server import openapi
from phase6_integration.server.dependencies import Server, ServerState, json_body
from phase6_integration.server.errors import conflict
from phase6_integration.server.formatter import Formatter
from phase6_integration.server.logprobs import for_completion, prompt_offsets
from phase6_integration.server.parsing import (
    check_lengths,
    check_options,
    check_scores,
    engine_requests,
    output_lengths,
    requested_length,
)
from phase6_integration.server.responses import CompletionChunk, CompletionResponse
from phase6_integration.server.schemas import CompletionRequest, Prompt
from phase6_integration.server.streaming import GenerationResponse
from phase6_integration.server.tokenization import TokenizerPool

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API

router = APIRouter(tags=["model"])


@router.post(
    "/v1/completions",
    responses=openapi.answer(CompletionResponse, CompletionChunk) | openapi.errors(openapi.ENGINE),
    openapi_extra=openapi.request_body(CompletionRequest),
)
async def create_completion(
    body: Annotated[CompletionRequest, json_body(CompletionRequest)], request: Request, server: Server
) -> Response:
    """A prompt, or several, continued."""
    given, context, pool = _split(body.prompt), server.engine.max_model_len, server.tokenizers
    check_options(server, body, len(given))
    if body.max_tokens == 0 and not body.echo:
        raise conflict("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to answer")
    prompts = await _tokenize(pool, request.state.tenant, given, context)
    tokens = [prompt.tokens for prompt in prompts]
    lengths = output_lengths(tokens, requested_length(body), DEFAULT_MAX_TOKENS, context)
    prompt_logprobs = body.logprobs if body.echo else None
    if prompt_logprobs is not None:
        check_scores(body, tokens, prompt_logprobs, server.settings.max_scores)
    echoes = [await _echo(pool, prompt) for prompt in prompts] if body.echo else None
    formatter = CompletionFormatter(server, body, request.state.request_id, tokens, echoes)
    tenant, logprobs = request.state.tenant, body.logprobs
    requests = engine_requests(server, tenant, body, formatter.id, tokens, lengths, logprobs, prompt_logprobs)
    return GenerationResponse(server, requests, formatter, body)


class _Prompt(NamedTuple):
    tokens: tuple[int, ...]
    text: str | None  # None: given as token ids


class Echo(NamedTuple):
    """A prompt as it is repeated at the start of the output."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]


def _split(prompt: Prompt) -> list[str] | list[list[int]]:
    """The list of prompts, whichever of the four forms was given."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [cast(list[int], prompt)]
        case _:
            return cast(list[str] | list[list[int]], prompt)


async def _tokenize(
    pool: TokenizerPool, tenant: str, prompts: list[str] | list[list[int]], context: int
) -> list[_Prompt]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        check_lengths(texts, pool.tokenizer.longest, context)
        return [_Prompt(*pair) for pair in zip(await pool.encode(texts, tenant), texts, strict=True)]
    return [_Prompt(tuple(cast(list[int], prompt)), None) for prompt in prompts]


async def _echo(pool: TokenizerPool, prompt: _Prompt) -> Echo:
    text = await pool.decode(prompt.tokens) if prompt.text is None else prompt.text
    return Echo(text, prompt.tokens, prompt_offsets(pool.tokenizer, prompt.tokens, text))


class CompletionFormatter(Formatter):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(
        self,
        server: ServerState,
        body: CompletionRequest,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        echoes: Sequence[Echo] | None,
    ) -> None:
        super().__init__(server, body, request_id, prompts)
        self.logprobs = body.logprobs is not None
        self._echo_only = body.max_tokens == 0  # the one token that the engine samples is not sent
        self._echoes = echoes
        self._unsent = set(range(len(prompts) * self.n))  # choices of which nothing is sent, not even the prompt

    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        reason, stop = new.finish_reason, None
        if self._echo_only:
            new, reason = Chunk(index), reason and FinishReason.LENGTH
        elif reason is FinishReason.STOP:
            stop = self.outputs[index].stop_reason
        text, tokens, offsets, found = new.text, [*new.tokens], [*new.offsets], new.logprobs
        if self._echoes is not None:
            echo = self._echoes[index // self.n]
            offsets = [offset + len(echo.text) for offset in offsets]
            if index in self._unsent:
                text = echo.text + text
                tokens, offsets = [*echo.tokens, *tokens], [*echo.offsets, *offsets]
                found = LogprobArrays([None])
                for part in (self.outputs[index].prompt_logprobs, new.logprobs):
                    found.extend(part or LogprobArrays())
                self.outputs[index].prompt_logprobs = None  # written once
            self._unsent.discard(index)
        logprobs = for_completion(self.names, tokens, found or (), offsets) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    delta = choice

    def _usage(self, completion: int) -> dict[str, Any]:
        return super()._usage(0 if self._echo_only else completion)
