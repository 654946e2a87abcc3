"""A request to /v1/responses: its fields and input items in OpenAI's form, and as a chat."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phase6_integration.api.errors import unservable
from phase6_integration.api.field_types import (
    FromClient,
    FunctionName,
    Hint,
    OptionalLength,
    RequestModel,
    TemplateVariables,
    by_kind,
)
from phase6_integration.api.schemas import MAX_MESSAGES, MAX_PARTS
from phase6_integration.extras.fields.field_kinds import TopLogprobs
from phase6_integration.extras.fields.request_fields import MAX_TOOLS, SamplingFields, StreamOptions
from phase6_integration.extras.other_apis.translation import Json, also_takes, by_type

MAX_METADATA = 16  # pairs
LOGPROBS = "message.output_text.logprobs"  # of `include`


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
    by_type("an item is a message, a function_call, a function_call_output or a reasoning", default="message"),
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


@also_takes("summary generate_summary context", ("standard", "mode"))
class ReasoningOptions(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


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


@also_takes("", (True, "include_usage"), (False, "continuous_usage_stats"))  # the last event always has the usage
class ResponsesStreamOptions(StreamOptions):
    pass


@also_takes(
    "access_programs image max_tool_calls prompt_cache_options",  # those tools are the ones that the server calls
    (False, "background enable_response_messages return_token_ids"),
    (None, "conversation moderation previous_response_id prompt prompt_logprobs"),
    (None, "max_tokens response_format"),  # here max_output_tokens, text.format
    (1, "best_of n"),
    ([], "context_management previous_input_messages"),
    ({}, "background_options"),
)
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
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None


# The chat request that says the same.


def chat_fields(body: ResponsesRequest) -> Json:
    """The chat request's fields, apart from plain copies."""
    logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    return {
        "messages": _messages(body),
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else body.truncate_prompt_tokens,  # -1: what fits
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "response_format": _response_format(body),
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(body),
        "stream_options": None,
    }


def _messages(request: ResponsesRequest) -> list[Json]:
    """The messages of the items. Adjacent reasoning, text and calls form one message of the assistant."""
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        match item:
            case ReasoningInput():
                if text := "".join(part.text for part in item.content or ()):
                    messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case FunctionCallInput():
                if not last:
                    messages.append(last := {"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case FunctionCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
            case InputMessage() if item.role == "assistant" and "reasoning_content" in last and _is_open(last):
                last["content"] = _content(item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": _content(item.content)})
    closed = [message for message in messages if not _is_open(message)]
    if not closed:
        raise unservable("input", "the input is reasoning alone; a message or a call is needed", "empty_prompt")
    return closed


def _is_open(message: Json) -> bool:
    """Whether a message of the assistant has neither text nor calls yet."""
    return message["content"] is None and "tool_calls" not in message


def _content(content: Content) -> str | list[Json]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content] or ""


def _response_format(request: ResponsesRequest) -> Json | None:
    format = request.text.format if request.text else None
    if format is None:
        return None
    if (format.type == "json_schema") != (format.schema_ is not None):
        raise unservable("text.format.schema", "text.format: type json_schema and schema go together")
    schema = format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": format.type, **({} if format.schema_ is None else {"json_schema": schema})}


def _tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _tool_choice(request: ResponsesRequest) -> str | Json | None:
    choice = request.tool_choice
    if isinstance(choice, ToolsAllowed):
        subset = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": choice.type, choice.type: subset}
    if isinstance(choice, NamedTool):
        return _named(choice)
    return None if choice == "auto" else choice  # auto is the default, which clients send without tools too


def _named(tool: NamedTool) -> Json:
    return {"type": "function", "function": {"name": tool.name}}
