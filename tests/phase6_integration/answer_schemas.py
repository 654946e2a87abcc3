"""The shapes of answers and chunks: the official client's types, and the fields that each object has and may have."""

from importlib.util import find_spec
from typing import Any, Literal

from openai import BaseModel
from openai.types import Completion, CompletionChoice, completion_choice
from openai.types.chat import ChatCompletion, ChatCompletionChunk

# The client reads what its types do not say: a prompt's first token has no probability, a chunk no finish reason.


class Logprobs(completion_choice.Logprobs):
    token_logprobs: list[float | None] | None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None  # type: ignore[assignment]


class ResponseChoice(CompletionChoice):
    logprobs: Logprobs | None = None


class ChunkChoice(ResponseChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionResponse(Completion):
    choices: list[ResponseChoice]  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


GENERATED = "id object created model system_fingerprint choices"
PROMPT = (
    "prompt_logprobs prompt_token_ids"  # fields of this server, as are stop_reason, token_ids and reasoning_content
)
# Those that only extras write.
BEYOND = set[str]() if find_spec("phase6_integration.extras") else {"logprobs", "token_ids", *PROMPT.split()}
FIELDS = {  # those that it has, and those that it may have
    "CompletionResponse": (f"{GENERATED} usage", ""),
    "CompletionChunk": (GENERATED, "usage"),
    "ResponseChoice": (f"index text logprobs finish_reason stop_reason token_ids {PROMPT}", ""),
    "ChunkChoice": ("index text logprobs finish_reason stop_reason", "token_ids prompt_token_ids"),
    "Logprobs": ("tokens token_logprobs top_logprobs text_offset", ""),
    "ChatCompletion": (f"{GENERATED} usage {PROMPT}", ""),
    "ChatCompletionChunk": (GENERATED, "usage prompt_token_ids"),
    "chat_completion.Choice": ("index message logprobs finish_reason stop_reason token_ids", ""),
    "chat_completion_chunk.Choice": ("index delta logprobs finish_reason stop_reason", "token_ids"),
    "ChatCompletionMessage": ("role content", "reasoning_content tool_calls"),
    "ChoiceDelta": ("", "role content reasoning_content tool_calls"),
    "ChoiceLogprobs": ("content", ""),
    "ChatCompletionTokenLogprob": ("token logprob bytes top_logprobs", ""),
    "TopLogprob": ("token logprob bytes", ""),
    "ChatCompletionMessageFunctionToolCall": ("id type function", ""),
    "ChoiceDeltaToolCall": ("index function", "id type"),
    "Function": ("name arguments", ""),
    "ChoiceDeltaToolCallFunction": ("arguments", "name"),
    "CompletionUsage": (
        "prompt_tokens completion_tokens total_tokens",
        "prompt_tokens_details completion_tokens_details",
    ),
    "CompletionTokensDetails": ("accepted_prediction_tokens rejected_prediction_tokens", ""),
    "PromptTokensDetails": ("cached_tokens", ""),
}


def completion(content: bytes | str) -> Any:
    return _checked(CompletionResponse.model_validate_json(content, strict=True))


def completion_chunk(content: bytes | str) -> Any:
    return _checked(CompletionChunk.model_validate_json(content, strict=True))


def chat(content: bytes | str) -> Any:
    return _checked(ChatCompletion.model_validate_json(content, strict=True))


def chat_chunk(content: bytes | str) -> Any:
    return _checked(ChatCompletionChunk.model_validate_json(content, strict=True))


def _checked(value: Any) -> Any:
    if isinstance(value, BaseModel):
        kind = type(value).__name__
        if kind == "Choice":
            kind = f"{type(value).__module__.rpartition('.')[2]}.{kind}"
        required, optional = (set(fields.split()) for fields in FIELDS[kind])
        assert required - BEYOND <= value.model_fields_set <= required | optional, kind
        for field in value.model_fields_set:
            _checked(getattr(value, field))
    elif isinstance(value, list):
        for item in value:
            _checked(item)
    return value
