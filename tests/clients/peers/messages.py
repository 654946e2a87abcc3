"""/v1/messages, Anthropic's API."""

from typing import Any

from peers.asking import CALCULATE, HELLO, Asked, Case, Differs, Json, streamed

MESSAGES = "/v1/messages"
TOOL = {"name": "calculate", "description": "arithmetic", "input_schema": CALCULATE}
OTHER = {**TOOL, "name": "other"}
USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "one", "name": "calculate", "input": {"sum": "2+2"}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "one", "content": "4"}
EVENTS = [
    *("message_start", "content_block_start", "content_block_delta"),
    *("content_block_stop", "message_delta", "message_stop"),
]
TEXTS = {
    "Unicode": "你好世界 🌍 Ωmega café",
    "emoji": "🎉🚀💻🔥✨🎨🌈",
    "white space": "   \n\t   ",
    "lines": "Line 1\nLine 2\n\nLine 4\n\n\nLine 7",
    "special characters": "<script>alert('x')</script> & \"quotes\"",
    "JSON": 'Parse {"name": "test", "values": [1, 2, 3]}',
    "code": "What does this do?\n```python\ndef foo(x):\n    return x * 2\n```",
}
TURNS = [{"role": role, "content": f"Message {number}"} for number in range(10) for role in ("user", "assistant")]


def messages(**fields: Any) -> tuple[str, Json]:
    return MESSAGES, {"model": "tiny_chat", "max_tokens": 50, "messages": HELLO, **fields}


def user(content: Any) -> tuple[str, Json]:
    return messages(messages=[{"role": "user", "content": content}])


def count(**fields: Any) -> tuple[str, Json]:
    return f"{MESSAGES}/count_tokens", {"model": "tiny_chat", "messages": HELLO, **fields}


def kinds(events: list[Json]) -> list[str]:
    return list(dict.fromkeys(event["type"] for event in events))


def calls(answer: Json) -> Any:
    return [block for block in answer["content"] if block["type"] == "tool_use"]


PASSING: dict[str, Case] = {
    "llama.cpp: messages": (
        messages(),
        lambda a: a["type"] == "message" and isinstance(a["usage"]["cache_read_input_tokens"], int),
    ),
    "llama.cpp: messages: system": (messages(system="Be brief."), lambda a: a["content"]),
    "llama.cpp: messages: a stream": (streamed(messages(max_tokens=30)), lambda e: kinds(e) == EVENTS),
    "llama.cpp: messages: a count": (count(), lambda a: set(a) == {"input_tokens"} and a["input_tokens"] > 0),
    "llama.cpp: messages: a count with system": (count(system="Be brief."), lambda a: a["input_tokens"] > 0),
    "llama.cpp: messages: tools": (messages(tools=[TOOL], max_tokens=100), lambda a: a["content"]),
    "llama.cpp: messages: a result": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [RESULT]}]),
        lambda a: a["content"][0]["type"] == "text",
    ),
    "llama.cpp: messages: a result and text": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [{"type": "text", "text": "So:"}, RESULT]}]),
        lambda a: a["content"],
    ),
    "llama.cpp: messages: a failed result": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [{**RESULT, "is_error": True}]}]),
        lambda a: a["type"] == "message",
    ),
    "llama.cpp: messages: tools streamed": (
        streamed(
            messages(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
        ),
        lambda e: e[1]["content_block"]["type"] == "tool_use" and e[-1]["type"] == "message_stop",
    ),
    "llama.cpp: messages: stop sequences": (
        messages(stop_sequences=["zzz"]),
        lambda a: a["stop_reason"] in ("end_turn", "max_tokens"),
    ),
    "llama.cpp: messages: sampling": (messages(temperature=0.5, top_p=0.9, top_k=40), lambda a: a["content"]),
    "llama.cpp: messages: thinking": (
        messages(thinking={"type": "enabled", "budget_tokens": 50}),
        lambda a: a["content"],
    ),
    "llama.cpp: messages: metadata": (messages(metadata={"user_id": "one"}), lambda a: a["content"]),
    "SGLang: messages: one token": (messages(max_tokens=1), lambda a: a["stop_reason"] in ("max_tokens", "end_turn")),
    "SGLang: messages: several blocks": (
        user([{"type": "text", "text": text} for text in ("One.", "Two.", "Three.")]),
        lambda a: a["content"],
    ),
    "SGLang: messages: a long system": (messages(system="You are a helpful assistant. " * 100), lambda a: a["content"]),
    "SGLang: messages: many turns": (messages(messages=[*TURNS, *HELLO]), lambda a: a["content"]),
    "SGLang: messages: the same again": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [RESULT]}, *HELLO]),
        lambda a: a["content"],
    ),
    "SGLang: messages: system of blocks": (
        messages(system=[{"type": "text", "text": "Be brief."}]),
        lambda a: a["content"],
    ),
    "SGLang: messages: any tool": (
        messages(tools=[TOOL, OTHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200),
        lambda a: calls(a) and a["stop_reason"] == "tool_use",
    ),
    "SGLang: messages: this tool": (
        messages(
            tools=[TOOL, OTHER],
            tool_choice={"type": "tool", "name": "calculate", "disable_parallel_tool_use": True},
            max_tokens=200,
        ),
        lambda a: calls(a)[0]["name"] == "calculate",
    ),
    "SGLang: messages: auto": (messages(tools=[TOOL], tool_choice={"type": "auto"}), lambda a: a["content"]),
    **{f"SGLang: messages: {name}": (user(text), lambda a: a["id"]) for name, text in TEXTS.items()},
}
WRONG: dict[str, Asked] = {
    "llama.cpp: messages without max_tokens": (MESSAGES, {"model": "tiny_chat", "messages": HELLO}),
    "SGLang: messages without any": messages(messages=[]),
    "SGLang: a role that is none": messages(messages=[{"role": "invalid_role", "content": "Hello"}]),
    "SGLang: max_tokens -1": messages(max_tokens=-1),
    "SGLang: a block that is none": user([{"type": "invalid_type", "data": "test"}]),
    "SGLang: a result without its call": user([{"type": "tool_result", "content": "result"}]),
}
REFUSED: dict[str, Differs] = {
    "llama.cpp: images": (user([{"type": "image", "source": {"type": "base64"}}]), "the models read text"),
}
MORE: dict[str, Differs] = {
    "SGLang: temperature 2": (messages(temperature=2.0), "the sampler takes up to 100, here as everywhere"),
    "SGLang: an unknown anthropic-beta": (
        (*messages(), {"anthropic-beta": "advanced-tool-use-2025-11-20"}),
        "a header announces fields, and those are checked",
    ),
}
