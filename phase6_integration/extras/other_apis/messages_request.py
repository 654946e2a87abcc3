"""A request to /v1/messages: its fields and content blocks in Anthropic's form, and as a chat."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from phase0_request.params import MAX_STOPS
from phase6_integration.api.errors import unservable
from phase6_integration.api.field_types import (
    FromClient,
    FunctionName,
    Hint,
    Name,
    OutputLength,
    RequestModel,
    Stop,
    TemplateVariables,
    by_kind,
)
from phase6_integration.api.schemas import MAX_MESSAGES, MAX_PARTS, MAX_USER
from phase6_integration.extras.fields.request_fields import MAX_TOOLS, SamplingFields
from phase6_integration.extras.other_apis.translation import Json, also_takes, by_type

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


Block = Annotated[
    Annotated[TextBlock, Tag("=text")]
    | Annotated[ToolUseBlock, Tag("=tool_use")]
    | Annotated[ToolResultBlock, Tag("=tool_result")]
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[RedactedBlock, Tag("=redacted_thinking")],
    by_type(f"a content block of this server is one of {', '.join(KINDS)}"),
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


@also_takes(
    "cache_control speed user_profile_id workspace_id",  # every prompt is cached, as long as there is room
    ({}, "context_management"),
    ([], "mcp_servers"),
)
class PromptFields(RequestModel):
    """The fields from which the prompt is made."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextContent | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables | None = None


class CountTokensRequest(PromptFields):
    model: Name | None = None


@also_takes(
    "diagnostics inference_geo",
    (None, "compaction container prompt_logprobs"),
    (None, "response_format stream_options"),  # here output_config.format; the usage always comes
    (None, "thread"),  # state on the server: a client that is told so sends all messages
    ([], "fallbacks stop"),  # here stop_sequences
    (False, "return_token_ids"),
    (1, "best_of n"),
)
class MessagesRequest(PromptFields, SamplingFields):
    """The fields of Anthropic's Messages API, and this server's sampling fields."""

    max_tokens: OutputLength
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None


# The chat request that says the same.


def chat_fields(body: PromptFields) -> Json:
    """The chat request's fields about its prompt, apart from plain copies."""
    system = [{"role": "system", "content": _text(body.system)}] if body.system else []
    messages = [*system, *(one for message in body.messages for one in _messages(message))]
    if not messages:
        raise unservable("messages", "messages: no message has any content", "empty_prompt")
    config, thinks = body.output_config, body.thinking and body.thinking.type != "disabled"
    output = config.format if config else None
    schema = None if output is None else {"name": "output", "schema": output.schema_}
    choice = body.tool_choice
    variables = {} if thinks is None else {"enable_thinking": thinks}
    return {
        "messages": messages,
        "tools": [{"type": "function", "function": _function(tool.model_dump())} for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "include_reasoning": thinks,
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
        "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})} or None,
        "continue_final_message": body.messages[-1].role == "assistant" or None,
    }


def _messages(message: Message) -> list[Json]:
    """The chat messages of one message: one per tool result, and one for all other blocks."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    texts = [{"type": "text", "text": block.text} for block in message.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    thinking = "".join(thoughts) if message.role == "assistant" else ""
    if calls and message.role != "assistant":
        raise unservable("messages", "messages: tool_use is the assistant's; a user has tool_result")
    if results and message.role != "user":
        raise unservable("messages", "messages: tool_result is the user's; an assistant has tool_use")
    own: Json = {"role": message.role, "content": texts or None}
    if message.role == "assistant":
        own |= {"tool_calls": calls or None, "reasoning_content": thinking or None}
    return [*results, _given(own)] if texts or calls or thinking else results


def _text(content: TextContent) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: Json) -> Json:
    return _given({"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]})


def _tool_choice(body: PromptFields) -> str | Json | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise unservable("tool_choice", "tool_choice: type tool needs the name of one")
    return {"type": "function", "function": {"name": choice.name}}


def _given(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
