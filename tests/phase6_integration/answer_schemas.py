"""The shapes of answers and of the chunks of a stream: these fields, of these types, and no others."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Response(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Response):
    cached_tokens: int  # found in the prefix cache


class Usage(Response):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # absent with --hide-cached-tokens


class PromptLogprob(Response):
    logprob: float
    rank: int | None  # among all tokens; null if it is not among the alternatives
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; the first token has none


class CompletionLogprobs(Response):
    """Parallel arrays. The first of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Response):
    index: int
    stop_reason: str | int | None  # the stop string or stop token that ended it
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None  # all that were generated, with those that ended it; in a chunk if requested


class Generated(Response):
    """What every answer and every chunk has."""

    id: str
    created: int
    model: str


class CompletionChunkChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None  # in the first chunk of a choice, if requested


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: PromptLogprobs | None


class CompletionResponse(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ChatLogprob(Response):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprobEntry(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(Response):
    content: list[ChatLogprobEntry]


class ChatMessage(Response):
    """Of an answer with plain text: `wings/tools` has those with calls and reasoning."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatResponse(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class ChatDelta(Response):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(Generated):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None  # in the first chunk, if requested
