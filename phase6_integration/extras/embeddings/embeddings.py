"""POST /v1/embeddings, OpenAI's Embeddings API: the final hidden state of an input's last token, of length 1.

An input is treated as a prompt for one token. The hidden state that this token is drawn from is the embedding, and the
token is not sent. So inputs are scheduled, chunked and found in the prefix cache like prompts.
"""

import math
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field

from phase0_request.params import MAX_TOKENS
from phase0_request.request import MAX_PRIORITY, MAX_SALT
from phase6_integration.api.completions import complete
from phase6_integration.api.errors import own_names, unservable
from phase6_integration.api.field_types import Name, Prompt, RequestModel, bounded
from phase6_integration.api.formatter import Formatter, encode
from phase6_integration.api.schemas import MAX_USER
from phase6_integration.api.state import Server, json_body
from phase6_integration.extras.fields.request_fields import CompletionRequest
from phase6_integration.extras.fields.token_details import details_of
from phase6_integration.process.outputs import Chunk

PATH = "/v1/embeddings"
MOST = 1024  # inputs of a request: clients send a thousand at a time
router = APIRouter(tags=["model"])


class EmbeddingsRequest(RequestModel):
    input: Prompt
    model: Name | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None  # the first so many, again of length 1
    encoding_format: Literal["float", "base64"] | None = None  # default: float
    pooling: Literal["last"] | None = None  # what is taken of an input: the state of its last token
    add_special_tokens: bool | None = None  # default: true
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # keep the last so many
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    priority: int | None = bounded(-MAX_PRIORITY, MAX_PRIORITY)  # lower values run earlier
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None  # for the access log
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None


@router.post(PATH)
@router.post(PATH.removeprefix("/v1"), include_in_schema=False)  # of clients with a base URL without /v1
async def create_embeddings(
    body: Annotated[EmbeddingsRequest, json_body(EmbeddingsRequest)], request: Request, server: Server
) -> Response:
    """An embedding of each input."""
    size = server.engine.config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise unservable("dimensions", f"dimensions: embeddings of this model have {size}, got {body.dimensions}")
    shared = body.model_dump(exclude={"input", "dimensions", "encoding_format", "pooling"}, exclude_none=True)
    with own_names(EmbeddingsFormatter.own_fields):
        prompts = CompletionRequest.model_validate({**shared, "prompt": body.input, "max_tokens": 1})
        return await complete(prompts, request, server, partial(EmbeddingsFormatter, asked=body), MOST, {"embed": True})


class EmbeddingsFormatter(Formatter):
    prefix = "embd-"
    object = chunk_object = "list"
    length_field = "input"
    own_fields: Mapping[str, str] = {"prompt": "input"}

    def __init__(self, *completion: Any, asked: EmbeddingsRequest) -> None:
        super().__init__(*completion)
        self._asked = asked

    def whole(self) -> Iterator[bytes]:
        about = {**self._top(self.object), "pooling": "last", "usage": self._usage(0)}
        before = encode(about)[:-1] + b',"data":['
        for index in range(len(self.prompts)):
            yield before + encode(self.choice(index, self._unwritten.pop(index)))
            before = b","
        yield b"]}"

    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        state = array("f", details_of(self.outputs[index]).embedding or b"")[: self._asked.dimensions]
        length = math.hypot(*state) or 1.0
        unit = array("f", (number / length for number in state))
        in_text = self._asked.encoding_format == "base64"
        found = b64encode(unit.tobytes()).decode() if in_text else unit.tolist()
        return {"object": "embedding", "index": index, "embedding": found}

    def text(self, new: Chunk, whole: bool) -> dict[str, Any]:
        raise NotImplementedError("embeddings are not streamed")


def attach(app: FastAPI) -> None:
    app.include_router(router)
