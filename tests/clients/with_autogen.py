"""AutoGen: OpenAIChatCompletionClient, and assistants and teams that use it."""

from functools import partial
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from subject import CITIES, QUESTION, Report, Server, get_weather, run

WEATHER = FunctionTool(get_weather, description="Look up the weather of a city.", strict=True)
ASKED = [SystemMessage(content="Be brief."), UserMessage(content=QUESTION, source="user")]
CAN = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def connected(server: Server, **options: Any) -> OpenAIChatCompletionClient:
    options = {"temperature": 0, "max_tokens": 128, "max_retries": 0, "parallel_tool_calls": False, **options}
    where = {"model": server.model, "base_url": server.url, "api_key": server.key}
    return OpenAIChatCompletionClient(**where, model_info={**CAN, "multiple_system_messages": True}, **options)


@pytest.fixture
def client(server: Server) -> OpenAIChatCompletionClient:
    return connected(server)


def test_create(client: OpenAIChatCompletionClient) -> None:
    answer = run(client.create(ASKED))
    assert answer.content
    assert answer.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 128


def test_create_stream(client: OpenAIChatCompletionClient) -> None:
    async def test() -> None:
        *parts, last = [part async for part in client.create_stream(ASKED, include_usage=True)]
        whole = await client.create(ASKED)
        assert isinstance(last, CreateResult)
        assert "".join(parts) == last.content == whole.content
        assert last.usage == whole.usage

    run(test())


def test_json_output(client: OpenAIChatCompletionClient) -> None:
    assert Report.model_validate_json(run(client.create(ASKED, json_output=Report)).content)
    assert run(client.create(ASKED, json_output=True)).content.lstrip().startswith("{")


def test_tools_streamed_and_whole(client: OpenAIChatCompletionClient) -> None:
    asked: Any = {"tools": [WEATHER], "tool_choice": "required"}

    async def test() -> None:
        *_, last = [part async for part in client.create_stream(ASKED, **asked)]
        whole = await client.create(ASKED, **asked)
        for answer in (last, whole):
            assert answer.finish_reason == "function_calls"
            assert all(isinstance(call, FunctionCall) and call.name == "get_weather" for call in answer.content)
            assert all(any(city in call.arguments for city in CITIES) for call in answer.content)
        assert [call.arguments for call in last.content] == [call.arguments for call in whole.content]

    run(test())


def test_results_of_tools_go_back(client: OpenAIChatCompletionClient) -> None:
    async def test() -> None:
        called = await client.create(ASKED, tools=[WEATHER], tool_choice="required")
        results = [
            FunctionExecutionResult(content="12 degrees", call_id=call.id, name=call.name, is_error=False)
            for call in called.content
        ]
        more = [AssistantMessage(content=called.content, source="a"), FunctionExecutionResultMessage(content=results)]
        assert (await client.create([*ASKED, *more], tools=[WEATHER])).content

    run(test())


def test_assistant_calls_a_tool(client: OpenAIChatCompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "create", partial(client.create, tool_choice="required"))
    messages = run(AssistantAgent("assistant", client, tools=[WEATHER]).run(task=QUESTION)).messages
    (event,) = [message for message in messages if isinstance(message, ToolCallExecutionEvent)]
    assert ["12 degrees" in result.content for result in event.content] == [True]
