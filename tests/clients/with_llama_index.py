"""LlamaIndex: OpenAILike as a completion model, a chat model and a model that calls functions."""

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from subject import CITIES, QUESTION, Report, Server, get_weather, run

WEATHER = FunctionTool.from_defaults(get_weather)
ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
PROMPT = PromptTemplate(QUESTION)


def connected(server: Server, **options: Any) -> OpenAILike:
    options = {"temperature": 0, "max_tokens": 128, "is_chat_model": True, "max_retries": 0, **options}
    return OpenAILike(model=server.model, api_base=server.url, api_key=server.key, context_window=2048, **options)


@pytest.fixture
def llm(server: Server) -> OpenAILike:
    return connected(server)


@pytest.fixture
def caller(server: Server) -> OpenAILike:
    return connected(server, is_function_calling_model=True)


def test_chat(llm: OpenAILike) -> None:
    answer = llm.chat(ASKED)
    assert answer.message.role is MessageRole.ASSISTANT
    assert answer.message.content
    assert answer.raw.usage.completion_tokens <= 128


def test_chat_streamed(llm: OpenAILike) -> None:
    parts = list(llm.stream_chat(ASKED))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == llm.chat(ASKED).message.content


def test_complete_by_the_chat_endpoint(llm: OpenAILike) -> None:
    assert llm.complete(QUESTION).text == list(llm.stream_complete(QUESTION))[-1].text != ""


@pytest.mark.parametrize("native", [True, False])
def test_structured_predict(server: Server, native: bool) -> None:
    llm = connected(server, is_function_calling_model=True, should_use_structured_outputs=native)
    assert isinstance(llm.structured_predict(Report, PROMPT), Report)


def test_structured_predict_streamed(server: Server) -> None:
    *_, last = connected(server, should_use_structured_outputs=True).stream_structured_predict(Report, PROMPT)
    assert Report.model_validate(last.model_dump())


def test_chat_with_tools_whole_and_streamed(caller: OpenAILike) -> None:
    *_, last = caller.stream_chat_with_tools([WEATHER], QUESTION, tool_required=True)
    whole = caller.chat_with_tools([WEATHER], QUESTION, tool_required=True)
    streamed, at_once = (caller.get_tool_calls_from_response(answer) for answer in (last, whole))
    assert [call.tool_kwargs for call in streamed] == [call.tool_kwargs for call in at_once]
    assert all(call.tool_name == "get_weather" and call.tool_kwargs["city"] in CITIES for call in at_once)


def test_results_of_tools_go_back(caller: OpenAILike) -> None:
    called = caller.chat_with_tools([WEATHER], QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = caller.get_tool_calls_from_response(called)
    result = WEATHER(**call.tool_kwargs).content
    told = ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})
    user = ChatMessage(role="user", content=QUESTION)
    answer = caller.chat_with_tools([WEATHER], chat_history=[user, called.message, told])
    assert answer.message.content or caller.get_tool_calls_from_response(answer)


def test_function_agent(caller: OpenAILike) -> None:
    async def answer() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=caller).run(QUESTION))

    assert run(answer())
