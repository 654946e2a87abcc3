"""POST /v1/completions."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, cast

from fastapi import APIRouter, Request, Response

from phase0_request.request import FinishReason
from phase6_integration.api.errors import unservable
from phase6_integration.api.field_types import Prompt
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.logprobs import for_completion, prompt_offsets
from phase6_integration.api.parsing import (
    check_lengths,
    check_options,
    engine_request,
    output_lengths,
    prompt_alternatives,
    requested_length,
    truncate,
)
from phase6_integration.api.schemas import CompletionRequest
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.api.streaming import GenerationResponse
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.outputs import Chunk, LogprobArrays

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API

router = APIRouter(tags=["model"])


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)
async def create_completion(
    body: Annotated[CompletionRequest, json_body(CompletionRequest)], request: Request, server: Server
) -> Response:
    """A prompt, or several, continued."""
    return await complete(body, request, server, CompletionFormatter)


async def complete(
    body: CompletionRequest,
    request: Request,
    server: ServerState,
    make: "Callable[..., Formatter]",
    most: int | None = None,
    **found: Any,
) -> GenerationResponse:
    """The response to prompts, for every API that has them. `make` is called as CompletionFormatter is, `most` is of
    `check_options`, and `found` are more fields of SamplingParams."""
    given, context, pool = _split(body.prompt), server.engine.max_model_len, server.tokenizers
    check_options(server, body, len(given), most)
    if body.max_tokens == 0 and not body.echo:
        raise unservable("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to answer")
    clip = server.settings.clip_max_tokens
    tenant, length = request.state.tenant, requested_length(body, context, clip)
    grammar = server.grammars.of(body)
    prompts = await _tokenize(pool, tenant, given, body, context)
    tokens = [prompt.tokens for prompt in prompts]
    lengths = output_lengths(tokens, length, DEFAULT_MAX_TOKENS, context, clip)
    scores = prompt_alternatives(body, tokens, body.logprobs if body.echo else None)
    echoes = (
        [await _echo(pool, prompt, body.skip_special_tokens is not False) for prompt in prompts] if body.echo else None
    )
    formatter = make(server, body, request.state.request_id, tokens, echoes)
    formatter.notes = grammar.notes if grammar else ()
    message = await engine_request(
        server,
        tenant,
        body,
        formatter.id,
        tokens,
        lengths,
        logprobs=body.logprobs,
        prompt_logprobs=scores,
        grammar=grammar and grammar.text,
        **found,
    )
    return GenerationResponse(server, message, formatter, body)


class _Prompt(NamedTuple):
    tokens: tuple[int, ...]
    text: str | None  # None: given as token ids, or truncated


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
    pool: TokenizerPool, tenant: str, prompts: list[str] | list[list[int]], body: CompletionRequest, context: int
) -> list[_Prompt]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    length = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not texts:
        return [_Prompt(truncate(cast(list[int], prompt), body, length, context), None) for prompt in prompts]
    if body.truncate_prompt_tokens is None:
        check_lengths(texts, pool.tokenizer.longest, context)
    encoded = await pool.encode(texts, tenant, body.add_special_tokens is not False)
    kept = [truncate(tokens, body, length, context) for tokens in encoded]
    return [
        _Prompt(left, text if len(left) == len(tokens) else None)
        for left, tokens, text in zip(kept, encoded, texts, strict=True)
    ]


async def _echo(pool: TokenizerPool, prompt: _Prompt, skip_special_tokens: bool) -> Echo:
    text = await pool.decode(prompt.tokens, skip_special_tokens) if prompt.text is None else prompt.text
    return Echo(text, prompt.tokens, prompt_offsets(pool.tokenizer, prompt.tokens, text))


class CompletionFormatter(Formatter):
    prefix = "cmpl-"
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
        self._most = body.logprobs or 0  # alternatives
        self._echo_only = body.max_tokens == 0  # the one token that the engine samples is not sent
        self._echoes = echoes
        self._unsent = set(range(len(prompts) * self.n))  # choices of which nothing is sent, not even the prompt

    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        about = self.about_prompt(index)
        return {**self._choice(index, new), **about, "token_ids": new.token_ids if self.returns_ids else None}

    def delta(self, index: int, new: Chunk) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self.returns_ids:
            about = {"token_ids": new.token_ids}
            if index in self._unsent:
                about["prompt_token_ids"] = self.prompts[index // self.n]
        return {**self._choice(index, new), **about}

    def _choice(self, index: int, new: Chunk) -> dict[str, Any]:
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
        logprobs = for_completion(self.names, tokens, found or (), offsets, self._most) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    def _usage(self, completion: int) -> dict[str, Any]:
        return super()._usage(0 if self._echo_only else completion)
