"""POST /v1/completions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, cast

from fastapi import APIRouter, Request, Response

from phase6_integration.api.additions import Asked, Json
from phase6_integration.api.field_types import Prompt
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.parsing import check_body, check_characters, output_length, requested_length, truncate
from phase6_integration.api.schemas import CompletionRequest
from phase6_integration.api.state import Server, ServerState, json_body
from phase6_integration.api.streaming import GenerationResponse, generate
from phase6_integration.process.outputs import Chunk

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
NO_MORE: Mapping[str, Any] = {}

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
    params: Mapping[str, Any] = NO_MORE,
) -> GenerationResponse:
    """The response to prompts, for every API that has them. `make` is called as CompletionFormatter is, `most` is of
    `check_body`, and `params` are more fields of SamplingParams."""
    given = _split(body.prompt)
    prepare = check_body(server, body, len(given), most)
    pool, client, length = server.tokenizers, request.state.client, requested_length(server, body)
    tokens, texts = cast(Sequence[Sequence[int]], given), [prompt for prompt in given if isinstance(prompt, str)]
    if texts:
        if body.truncate_prompt_tokens is None:
            check_characters(server, texts)
        tokens = await pool.encode(texts, client, body.add_special_tokens is not False)
    keep_room = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [truncate(server, prompt, body, keep_room) for prompt in tokens]
    asked = Asked(
        body,
        client,
        prompts,
        lengths=[output_length(server, prompt, length, DEFAULT_MAX_TOKENS) for prompt in prompts],
        texts={number: text for number, text in enumerate(texts) if len(prompts[number]) == len(tokens[number])},
        params={**params},
    )
    return await generate(server, asked, prepare, make(server, asked, request.state.request_id))


def _split(prompt: Prompt) -> list[str] | list[list[int]]:
    """The list of prompts, whichever of the four forms was given."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [cast(list[int], prompt)]
        case _:
            return cast(list[str] | list[list[int]], prompt)


class CompletionFormatter(Formatter):
    prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def text(self, new: Chunk, whole: bool) -> Json:
        return {"text": new.text}
