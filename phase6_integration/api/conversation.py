"""conversation: the messages of a request, in the form that chat templates expect."""

import json
from typing import Any

from phase6_integration.api.errors import unservable
from phase6_integration.api.schemas import AnyMessage, AssistantMessage, Content, ConversationFields, ToolCall


def conversation(body: ConversationFields) -> dict[str, Any]:
    """The arguments of Tokenizer.chat, without template variables that are null."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message continues the last message; add_generation_prompt would begin another"
        raise unservable("add_generation_prompt", message)
    variables = {**body.variables(), **(body.chat_template_kwargs or {})}
    return {
        "messages": list(map(_message, body.messages)),
        "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
        "variables": {name: value for name, value in variables.items() if value is not None},
    }


def text_of(content: Content | None) -> str:
    """The content of a message as one string. Text parts are joined by newlines, as in vLLM."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _message(message: AnyMessage) -> dict[str, Any]:
    others: dict[str, Any] = {"name": message.name}
    if isinstance(message, AssistantMessage):
        calls = [_call(one) for one in message.tool_calls or ()]
        others |= {"reasoning_content": message.reasoning_content, "tool_calls": calls}
    else:
        others["tool_call_id"] = message.tool_call_id
    given = {name: value for name, value in others.items() if value}
    if message.content and {"tool_calls", "reasoning_content"} <= given.keys():
        given["thinking"] = ""  # transformers copies the reasoning to it; gpt-oss's template refuses both beside calls
    return {"role": message.role, "content": text_of(message.content), **given}


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates expect the arguments as an object. Anything but the JSON of one stays text: an answer that was cut off
    comes back too, or one with an escape that is half of a surrogate pair, which is not text."""
    text = call.function.arguments or "{}"
    try:
        arguments = json.loads(text)
        if "\\u" in text:
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = text
    given = arguments if isinstance(arguments, dict) else text
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": given}}
