"""Request schemas: every field that a client may send to the core, typed and bounded. An unknown field is an error.

Bounds that depend on the model or the settings are checked where a field is used. Extras have schemas with more fields,
which take the place of these (`ServerState.bodies`).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from phase0_request.params import MAX_STOPS, MAX_TOKEN_ID, MAX_TOKENS
from phase0_request.request import MAX_PRIORITY, MAX_SALT
from phase6_integration.api.field_types import (
    Choices,
    FromClient,
    FunctionName,
    Name,
    OptionalLength,
    Prompt,
    RequestModel,
    Role,
    Stop,
    StopTokens,
    TemplateVariables,
    Unsupported,
    bounded,
    by_kind,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts of all messages together
MAX_USER = 256  # characters
MAX_CALLS = 512  # of one message
MAX_DOCUMENTS = 512


class StreamOptions(RequestModel):
    include_usage: bool | None = None  # a last chunk with the usage and no choices
    continuous_usage_stats: bool | None = None  # with include_usage: in every chunk, the usage so far


class SamplingFields(RequestModel):
    """The fields that completions and chat completions share."""

    model: Name | None = None
    max_tokens: OptionalLength = None
    temperature: float | None = bounded(0, 100)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = bounded(-1, MAX_TOKEN_ID)
    min_p: float | None = bounded(0, 1)
    n: Choices | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("=text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("=list")],
            by_kind(f"stop is a string or a list of up to {MAX_STOPS} strings"),
        ]
        | None
    ) = None
    stop_token_ids: StopTokens | None = None
    seed: int | None = bounded(-(1 << 63), (1 << 63) - 1)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # default: true
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # keep the last so many
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = bounded(-MAX_PRIORITY, MAX_PRIORITY)  # lower values run earlier
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None  # for the access log
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    add_special_tokens: bool | None = None  # default: true


class TextPart(FromClient):
    type: Literal["text"]
    text: str


class FunctionCall(FromClient):
    name: FunctionName
    arguments: str  # a JSON object


class ToolCall(FromClient):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("=list")],
    by_kind("the content of a message is a string or a list of text parts"),
]


class PlainMessage(FromClient):
    role: Role  # any that the template takes; an assistant's is of the next class
    content: Content
    name: Name | None = None
    tool_call_id: Name | None = None


class AssistantMessage(FromClient):
    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    function_call: Annotated[Any, Unsupported()] = None


def _kind_of_message(value: Any) -> str:
    return "=assistant" if isinstance(value, dict) and value.get("role") == "assistant" else "=other"


def _few_parts(messages: "list[AnyMessage]") -> "list[AnyMessage]":
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", f"the messages may have at most {MAX_PARTS} text parts together")
    return messages


AnyMessage = Annotated[
    Annotated[AssistantMessage, Tag("=assistant")] | Annotated[PlainMessage, Tag("=other")],
    Discriminator(_kind_of_message),
]
Messages = Annotated[
    list[AnyMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_few_parts),
]


class ConversationFields(RequestModel):
    """The input of a chat template."""

    messages: Messages
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None  # default: true, unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def variables(self) -> dict[str, Any]:
        """The template's variables that have their own fields. null means not given."""
        return {"documents": self.documents or None, "continue_final_message": self.continue_final_message or None}


class ChatRequest(SamplingFields, ConversationFields):
    max_completion_tokens: OptionalLength = None
    add_special_tokens: bool | None = None  # on top of those of the template; default: false
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def variables(self) -> dict[str, Any]:
        return {"reasoning_effort": self.reasoning_effort, **super().variables()}
