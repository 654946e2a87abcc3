"""What clients may send. Every field is known, typed and bounded; none is accepted and ignored.

Types are strict: "5" is no number and true is no 1. null is the same as not given. What depends on the model or on the
settings, such as the vocabulary, is narrowed for each server by `bounds.py`, so that /openapi.json is exact about it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from phase0_request.params import (
    MAX_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
)
from phase0_request.request import MAX_PRIORITY, MAX_SALT

MAX_PARTS = 1024  # of the contents of all messages together
MAX_CHOICES = 1 << 20
MAX_LOGPROBS = 1 << 20
MAX_USER = 256  # characters

Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Prompt = str | list[str] | list[int] | list[list[int]]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
BiasedToken = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Biases = Annotated[
    dict[BiasedToken, Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
]


def bounded(low: float, high: float) -> Any:
    """A number within bounds, both included, that need not be given."""
    return Field(None, ge=low, le=high, allow_inf_nan=False)


def _kind_of_text(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


class StreamOptions(Model):
    include_usage: bool = False  # one more chunk, with no choices and the usage
    continuous_usage_stats: bool = False  # the usage so far in every chunk


class ResponseFormat(Model):
    type: Literal["text"]


class Sampled(Model):
    """What a completion and a chat completion have in common."""

    model: Name | None = None
    max_tokens: int | None = bounded(1, MAX_TOKENS)
    min_tokens: int | None = bounded(0, MAX_TOKENS)
    temperature: float | None = bounded(0, 100)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = bounded(-1, MAX_TOKEN_ID)
    min_p: float | None = bounded(0, 1)
    n: int | None = bounded(1, MAX_CHOICES)
    stop: (
        Annotated[
            Annotated[Stop, Tag("=text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("=list")],
            Discriminator(
                _kind_of_text,
                custom_error_type="stop",
                custom_error_message=f"stop is a string or a list of up to {MAX_STOPS} strings",
            ),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    seed: int | None = bounded(-(1 << 63), (1 << 63) - 1)
    presence_penalty: float | None = bounded(-2, 2)
    frequency_penalty: float | None = bounded(-2, 2)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = bounded(-MAX_PRIORITY, MAX_PRIORITY)  # lower runs earlier
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None  # for the access log
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None


class CompletionRequest(Sampled):
    prompt: Prompt
    max_tokens: int | None = bounded(0, MAX_TOKENS)  # 0: only the prompt, with echo
    logprobs: int | None = bounded(0, MAX_LOGPROBS)
    echo: bool | None = None


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("=list")],
        Discriminator(
            _kind_of_text,
            custom_error_type="content",
            custom_error_message="the content of a message is a string or a list of text parts",
        ),
    ]

    @property
    def text(self) -> str:
        """Its parts are lines, as they are to other servers."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1)]


class ChatRequest(Sampled):
    messages: Messages
    max_completion_tokens: int | None = bounded(1, MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = bounded(0, MAX_LOGPROBS)
    add_generation_prompt: bool | None = None


class TokenizeText(Model):
    model: Name | None = None
    prompt: str
    add_special_tokens: bool | None = None  # by default they are added
    return_token_strs: bool | None = None


class TokenizeChat(Model):
    model: Name | None = None
    messages: Messages
    add_generation_prompt: bool | None = None  # by default it is added
    return_token_strs: bool | None = None


class DetokenizeRequest(Model):
    model: Name | None = None
    tokens: list[Token]
