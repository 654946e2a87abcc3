"""LangChain: ChatOpenAI and OpenAI with a base URL, structured output, tools and an agent."""

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from subject import CITIES, QUESTION, Report, Server, get_weather

weather = tool(get_weather)


def connected(server: Server, **options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 128, **options}
    return ChatOpenAI(base_url=server.url, api_key=server.key, model=server.model, max_retries=0, **options)


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return connected(server)


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return reduce(add, chunks)


def test_invoke_has_text_usage_and_finish_reason(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata["total_tokens"] == sum(answer.usage_metadata[f"{s}put_tokens"] for s in ("in", "out"))
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == "tiny_chat"


def test_stream_is_the_answer_of_invoke(chat: ChatOpenAI) -> None:
    whole = joined(list(chat.stream(QUESTION, stream_usage=True)))
    answer = chat.invoke(QUESTION)
    assert whole.text == answer.text
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]


def test_conversation_goes_on_with_its_answers(chat: ChatOpenAI) -> None:
    messages: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage(QUESTION, name="ada")]
    messages += [chat.invoke(messages), HumanMessage([{"type": "text", "text": "And in Rome?"}])]
    assert chat.invoke(messages).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [True, None])
def test_with_structured_output(chat: ChatOpenAI, method: str, strict: bool | None) -> None:
    assert isinstance(chat.with_structured_output(Report, method=method, strict=strict).invoke(QUESTION), Report)


def test_structured_output_of_a_schema_streamed(chat: ChatOpenAI) -> None:
    schema = {"title": "report", **Report.model_json_schema()}
    *_, last = chat.with_structured_output(schema, method="json_schema").stream(QUESTION)
    assert Report.model_validate(last)


@pytest.mark.parametrize("choice", ["required", "any", "get_weather", True])
def test_bind_tools_with_a_choice(chat: ChatOpenAI, choice: str | bool) -> None:
    answer = chat.bind_tools([weather], tool_choice=choice, strict=True).invoke(QUESTION)
    assert answer.invalid_tool_calls == []
    assert {call["name"] for call in answer.tool_calls} == {"get_weather"}
    assert all(call["args"]["city"] in CITIES and call["id"] for call in answer.tool_calls)


def test_bind_tools_streamed(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    whole = joined(list(bound.stream(QUESTION)))
    assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in bound.invoke(QUESTION).tool_calls]
    assert whole.response_metadata["finish_reason"] in ("tool_calls", "stop")


def test_results_of_tools_go_back(chat: ChatOpenAI) -> None:
    asked = HumanMessage(QUESTION)
    called = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke([asked])
    results = [weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = chat.bind_tools([weather]).invoke([asked, called, *results])
    assert answer.text or answer.tool_calls


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_agent_with_structured_output(chat: ChatOpenAI, strategy: Any) -> None:
    agent = create_agent(chat, tools=[], response_format=strategy(Report))
    assert isinstance(agent.invoke({"messages": [HumanMessage(QUESTION)]})["structured_response"], Report)


def test_responses_api(server: Server) -> None:
    chat = connected(server, use_responses_api=True)
    asked = HumanMessage(QUESTION)
    answer = chat.invoke([asked])
    assert answer.text == joined(list(chat.stream([asked]))).text != ""
    assert answer.usage_metadata["output_tokens"] > 0
    assert chat.invoke([asked, answer, HumanMessage("And in Rome?")]).text
    assert isinstance(chat.with_structured_output(Report).invoke([asked]), Report)
    called = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke([asked])
    assert {call["name"] for call in called.tool_calls} == {"get_weather"}
    results = [weather.invoke(call) for call in called.tool_calls]
    answer = chat.bind_tools([weather]).invoke([asked, called, *results])
    assert answer.text or answer.tool_calls
