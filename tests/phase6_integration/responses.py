"""Requests to /v1/responses over a fake engine, and answers in the shapes of the official client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

from phase6_integration import connect
from phase6_integration.app import create_app
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, Script, echo

PATH = "/v1/responses"
KEY = "sk-of-the-test"
EVENTS: dict[str, Any] = {  # by type, in the official client
    kind: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
    for kind in get_args(event.model_fields["type"].annotation)
}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object"}}
Json = dict[str, Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def ask(body: Json, script: Script = echo, **settings: Any) -> Call:
    """One request, to its end."""

    async def send() -> Call:
        async with Call(create_app(FakeEngine(script), connect.settings(**settings)), PATH, body) as call:
            pass
        return call

    return asyncio.run(asyncio.wait_for(send(), 60))


def answer(body: Json, script: Script = echo, **settings: Any) -> Json:
    """A whole answer, in the official client's shape."""
    call = ask(body, script, **settings)
    assert call.status == 200, call.content
    Response.model_validate(call.json, strict=True)
    return dict(call.json)


def events_of(call: Call) -> list[Json]:
    """The events of a stream: each named, numbered, and in the official client's shape."""
    assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = [block for block in call.content.decode().split("\n\n") if block and not block.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS[event["type"]].model_validate(event, strict=True)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(body: Json, script: Script = echo, **settings: Any) -> list[Json]:
    call = ask({**body, "stream": True}, script, **settings)
    assert call.status == 200, call.content
    return events_of(call)


def kinds(events: list[Json]) -> list[str]:
    """The types of the events, each run of deltas as one."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(found) if not (kind.endswith(".delta") and found[i - 1 : i] == [kind])]


def error_of(body: Json) -> Json:
    call = ask(body)
    assert call.status == 400, call.content
    return dict(call.json["error"])
