"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, without state. A request becomes a chat
request; the answer is written as content blocks and their events.
"""

import json
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response

from phase6_integration.api.chat import continue_chat
from phase6_integration.api.conversation import conversation
from phase6_integration.api.errors import own_names, unservable
from phase6_integration.api.state import Server, json_body
from phase6_integration.extras.fields.request_fields import ChatRequest, SamplingFields
from phase6_integration.extras.messages.messages_formatter import MessagesFormatter, error_body
from phase6_integration.extras.messages.messages_request import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    PromptFields,
    TextBlock,
    TextContent,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
router = APIRouter(tags=["model"])
Json = dict[str, Any]


@router.post(PATH)
async def create_message(
    body: Annotated[MessagesRequest, json_body(MessagesRequest)], request: Request, server: Server
) -> Response:
    """A conversation, continued by the assistant. If its last message is the assistant's, that one is continued."""
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    own = {
        "stop": body.stop_sequences,
        "user": (body.metadata and body.metadata.user_id) or body.user,
        "metadata": None,
    }
    with own_names(MessagesFormatter.own_fields):
        chat = ChatRequest.model_validate(_given({**shared, **own, **prompt_of(body)}))
        return await continue_chat(chat, request, server, MessagesFormatter)


@router.post(COUNT)
async def count_tokens(
    body: Annotated[CountTokensRequest, json_body(CountTokensRequest)], request: Request, server: Server
) -> dict[str, int]:
    """The number of tokens of a prompt."""
    server.model_name(body.model)
    with own_names(MessagesFormatter.own_fields):
        chat = ChatRequest.model_validate(_given(prompt_of(body)))
        arguments = conversation(chat)
        return {"input_tokens": len(await server.tokenizers.chat(arguments, request.state.client, fits=True))}


def prompt_of(body: PromptFields) -> Json:
    """The fields of a chat request that say the same about its prompt."""
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
        "reasoning_effort": config.effort if config else None,
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
        "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})} or None,
        "continue_final_message": body.messages[-1].role == "assistant" or None,
    }


def _messages(message: Message) -> list[Json]:
    """The chat messages of a message: the results of tools have one each, and the other blocks share one."""
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


def attach(app: FastAPI) -> None:
    app.include_router(router)
    app.state.server.error_bodies[PATH] = error_body
