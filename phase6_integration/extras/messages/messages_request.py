"""Schema of a request to /v1/messages: its fields and content blocks, as Anthropic's Messages API has them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phase0_request.params import MAX_STOPS
from phase6_integration.api.field_types import (
    FromClient,
    FunctionName,
    Hint,
    Name,
    OutputLength,
    RequestModel,
    Stop,
    TemplateVariables,
    Unsupported,
    by_kind,
)
from phase6_integration.api.schemas import MAX_MESSAGES, MAX_PARTS, MAX_USER
from phase6_integration.extras.fields.request_fields import MAX_TOOLS, SamplingFields

KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")  # of content blocks


# Content blocks.


class TextBlock(FromClient):
    type: Literal["text"]
    text: str


class ToolUseBlock(FromClient):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]
TextContent = Annotated[
    Annotated[str, Tag("=text")] | Annotated[TextBlocks, Tag("=list")],
    by_kind("a string or a list of text blocks is needed; images and documents are not served"),
]


class ToolResultBlock(FromClient):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: TextContent = ""
    is_error: bool | None = None  # no chat template knows it: the content says what went wrong


class ThinkingBlock(FromClient):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(FromClient):
    type: Literal["redacted_thinking"]


def _type_of_block(value: Any) -> str | None:
    return f"={value.get('type')}" if isinstance(value, dict) else None


Block = Annotated[
    Annotated[TextBlock, Tag("=text")]
    | Annotated[ToolUseBlock, Tag("=tool_use")]
    | Annotated[ToolResultBlock, Tag("=tool_result")]
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[RedactedBlock, Tag("=redacted_thinking")],
    Discriminator(
        _type_of_block,
        custom_error_type="block",
        custom_error_message=f"a content block of this server is one of {', '.join(KINDS)}",
    ),
]
Content = Annotated[
    Annotated[str, Tag("=text")] | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("=list")],
    by_kind("the content of a message is a string or a list of content blocks"),
]


class Message(FromClient):
    role: Literal["user", "assistant", "system"]
    content: Content


# Tools and options.


class CustomTool(FromClient):
    type: Annotated[Literal["custom"] | None, Field(description="The tools that Anthropic runs are not served.")] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(FromClient):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None  # with "tool"
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(FromClient):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Hint = None  # max_tokens bounds thinking and answer together


class OutputFormat(FromClient):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(FromClient):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(FromClient):
    user_id: Annotated[str, Field(max_length=MAX_USER)] | None = None


class PromptFields(RequestModel):
    """What the prompt is made from."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextContent | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_control: Hint = None  # every prompt is cached, as long as there is room
    speed: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None
    context_management: Annotated[Any, Unsupported({})] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None


class CountTokensRequest(PromptFields):
    model: Name | None = None


class MessagesRequest(PromptFields, SamplingFields):
    """The fields of Anthropic's Messages API, and this server's sampling fields."""

    max_tokens: OutputLength
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    diagnostics: Hint = None
    inference_geo: Hint = None
    compaction: Annotated[Any, Unsupported()] = None
    container: Annotated[Any, Unsupported()] = None
    fallbacks: Annotated[Any, Unsupported([])] = None
    thread: Annotated[Any, Unsupported()] = None  # state on the server: a client that is told so sends all messages
    best_of: Annotated[Any, Unsupported(1)] = None
    n: Annotated[Any, Unsupported(1)] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    response_format: Annotated[Any, Unsupported()] = None  # output_config.format
    return_token_ids: Annotated[Any, Unsupported(False)] = None
    stop: Annotated[Any, Unsupported([])] = None  # stop_sequences
    stream_options: Annotated[Any, Unsupported()] = None  # the usage always comes
