"""The shapes of answers and chunks: these fields, of these types, and no others."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


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


class Generated(Response):
    """What every answer and every chunk has."""

    id: str
    created: int
    model: str


class Choice(Response):
    index: int
    stop_reason: str | int | None  # the stop string or stop token that ended it


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None  # all that were generated, with those that ended it


class CompletionResponse(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: list[int] | None = None  # in the first chunk of a choice, if requested
    token_ids: list[int] | None = None


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


class CalledFunction(Response):
    name: str
    arguments: str  # JSON, as the model wrote it


class MessageToolCall(Response):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Response):
    role: Literal["assistant"]
    content: str | None  # null: there is only reasoning, or calls
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None


class ChatResponse(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CalledFunctionDelta(Response):
    name: str | None = None
    arguments: str


class ToolCallDelta(Response):
    index: int
    id: str | None = None  # with the first part of a call, as are its type and its name
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(Response):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(Generated):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None  # in the first chunk, if requested
