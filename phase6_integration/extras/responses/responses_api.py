"""POST /v1/responses: OpenAI's Responses API, without state. A request becomes a chat request; the answer is written as
output items and their events.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response

from phase6_integration.api.chat import continue_chat
from phase6_integration.api.errors import own_names, unservable
from phase6_integration.api.state import Server, json_body
from phase6_integration.extras.fields.request_fields import ChatRequest, SamplingFields
from phase6_integration.extras.responses.responses_formatter import ResponsesFormatter
from phase6_integration.extras.responses.responses_request import (
    LOGPROBS,
    Content,
    FunctionCallInput,
    FunctionCallOutput,
    FunctionTool,
    InputMessage,
    NamedTool,
    ReasoningInput,
    ResponsesRequest,
    ToolsAllowed,
)

router = APIRouter(tags=["model"])


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)  # of clients with a base URL without /v1
async def create_response(
    body: Annotated[ResponsesRequest, json_body(ResponsesRequest)], request: Request, server: Server
) -> Response:
    """A conversation of input items, continued by the assistant. Nothing is stored: the input is the whole of it."""
    with own_names(ResponsesFormatter.own_fields):
        chat = ChatRequest.model_validate(chat_body(body))
        return await continue_chat(chat, request, server, partial(ResponsesFormatter, asked=body))


def chat_body(request: ResponsesRequest) -> dict[str, Any]:
    """The chat request that says the same."""
    shared = {name: getattr(request, name) for name in SamplingFields.model_fields if name != "stream_options"}
    logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    keep = -1 if request.truncation == "auto" else request.truncate_prompt_tokens  # -1: as many as fit
    own = {
        "messages": _messages(request),
        "truncate_prompt_tokens": keep,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": logprobs or None,
        "top_logprobs": request.top_logprobs if logprobs else None,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
        "response_format": _response_format(request),
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": _tool_choice(request),
    }
    return {name: value for name, value in {**shared, **own}.items() if value is not None}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of the items. Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
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


def _is_open(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant has neither text nor calls yet."""
    return message["content"] is None and "tool_calls" not in message


def _content(content: Content) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content] or ""


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    format = request.text.format if request.text else None
    if format is None:
        return None
    if (format.type == "json_schema") != (format.schema_ is not None):
        raise unservable("text.format.schema", "text.format: type json_schema and schema go together")
    schema = format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": format.type, **({} if format.schema_ is None else {"json_schema": schema})}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if isinstance(choice, ToolsAllowed):
        subset = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": choice.type, choice.type: subset}
    if isinstance(choice, NamedTool):
        return _named(choice)
    return None if choice == "auto" else choice  # auto is the default, which clients send without tools too


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def attach(app: FastAPI) -> None:
    app.include_router(router)
