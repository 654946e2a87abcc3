"""Schema of a request to /v1/responses: its fields and input items, as OpenAI's Responses API has them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phase6_integration.api.field_types import (
    FromClient,
    FunctionName,
    Hint,
    OptionalLength,
    RequestModel,
    TemplateVariables,
    Unsupported,
    by_kind,
)
from phase6_integration.api.schemas import MAX_MESSAGES, MAX_PARTS
from phase6_integration.extras.fields.field_kinds import TopLogprobs
from phase6_integration.extras.fields.request_fields import MAX_TOOLS, SamplingFields, StreamOptions

MAX_METADATA = 16  # pairs
LOGPROBS = "message.output_text.logprobs"  # of `include`


def _type_of_item(value: Any) -> str | None:
    return f"={value.get('type', 'message')}" if isinstance(value, dict) else None


# Input items.


class ContentPart(FromClient):
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(FromClient):
    type: Literal["refusal"]
    text: str = Field(validation_alias="refusal")


def _type_of_part(value: Any) -> str:
    return "=refusal" if isinstance(value, dict) and value.get("type") == "refusal" else "=text"


MessagePart = Annotated[
    Annotated[ContentPart, Tag("=text")] | Annotated[RefusalPart, Tag("=refusal")], Discriminator(_type_of_part)
]
Parts = Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("=text")] | Annotated[Parts, Tag("=list")],
    by_kind("content is a string or a list of text parts"),
]


class InputMessage(FromClient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallInput(FromClient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(FromClient):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(FromClient):
    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(FromClient):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("=message")]
    | Annotated[FunctionCallInput, Tag("=function_call")]
    | Annotated[FunctionCallOutput, Tag("=function_call_output")]
    | Annotated[ReasoningInput, Tag("=reasoning")],
    Discriminator(
        _type_of_item,
        custom_error_type="item",
        custom_error_message="an item is a message, a function_call, a function_call_output or a reasoning",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


# The request.


class FunctionTool(FromClient):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(FromClient):
    type: Literal["function"]
    name: FunctionName


class ToolsAllowed(FromClient):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=text")]
    | Annotated[NamedTool, Tag("=tool")]
    | Annotated[ToolsAllowed, Tag("=some_tools")],
    by_kind("tool_choice is none, auto, required, a function with a name or allowed_tools"),
]


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None  # this and the following are for json_schema
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: Hint = None


class ReasoningOptions(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Hint = None
    generate_summary: Hint = None
    context: Hint = None
    mode: Annotated[Any, Unsupported("standard")] = None


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # this and the following have no effect: what they are about does not occur here
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesStreamOptions(StreamOptions):
    include_usage: Annotated[Any, Unsupported(True)] = None  # the last event always has it
    continuous_usage_stats: Annotated[Any, Unsupported(False)] = None


class ResponsesRequest(SamplingFields):
    """The fields of OpenAI's Responses API, and this server's sampling fields."""

    input: Annotated[
        Annotated[str, Tag("=text")] | Annotated[Items, Tag("=list")],
        by_kind("the input is a string or a list of items"),
    ]
    instructions: str | None = None
    max_output_tokens: OptionalLength = None
    top_logprobs: TopLogprobs | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Included] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)] | None = None
    access_programs: Hint = None
    image: Hint = None
    max_tool_calls: Hint = None  # of tools that the server calls
    prompt_cache_options: Hint = None
    background: Annotated[Any, Unsupported(False)] = None
    background_options: Annotated[Any, Unsupported({})] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    context_management: Annotated[Any, Unsupported([])] = None
    conversation: Annotated[Any, Unsupported()] = None
    enable_response_messages: Annotated[Any, Unsupported(False)] = None
    max_tokens: Annotated[Any, Unsupported()] = None  # max_output_tokens
    moderation: Annotated[Any, Unsupported()] = None
    n: Annotated[Any, Unsupported(1)] = None
    previous_input_messages: Annotated[Any, Unsupported([])] = None
    previous_response_id: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    response_format: Annotated[Any, Unsupported()] = None  # text.format
    return_token_ids: Annotated[Any, Unsupported(False)] = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
