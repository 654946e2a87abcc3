"""LiteLLM: the providers `hosted_vllm` and `openai` with an API base, and `text-completion-openai`."""

from typing import Any

import litellm
import pytest
from litellm import completion, responses, stream_chunk_builder
from subject import CITIES, QUESTION, TOOL, Report, Server

ASKED: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=["hosted_vllm", "openai"])
def options(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    where = {"model": f"{request.param}/{server.model}", "api_base": server.url, "api_key": server.key}
    return {**where, "temperature": 0, "max_tokens": 128, "num_retries": 0}


def test_completion(options: dict[str, Any]) -> None:
    answer = completion(messages=ASKED, **options)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_streamed(options: dict[str, Any]) -> None:
    chunks = list(completion(messages=ASKED, stream=True, stream_options={"include_usage": True}, **options))
    whole, rebuilt = completion(messages=ASKED, **options), stream_chunk_builder(chunks, messages=ASKED)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_messages_go_back_as_they_came(options: dict[str, Any]) -> None:
    message = completion(messages=ASKED, **options).choices[0].message
    more = {"role": "user", "content": "And in Rome?"}
    for returned in (message, message.model_dump()):
        assert completion(messages=[*ASKED, returned, more], **options).choices[0].message.content


def test_response_format_whole_and_streamed(options: dict[str, Any]) -> None:
    asked = {**options, "messages": ASKED, "response_format": Report}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in completion(stream=True, **asked))
    for content in (completion(**asked).choices[0].message.content, streamed):
        assert Report.model_validate_json(content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(options: dict[str, Any], choice: Any) -> None:
    answer = completion(messages=ASKED, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **options)
    calls = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"get_weather"}
    assert all(any(city in call.function.arguments for city in CITIES) for call in calls)
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")


def test_tools_streamed(options: dict[str, Any]) -> None:
    asked = {**options, "messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
    rebuilt = stream_chunk_builder(list(completion(stream=True, **asked)))
    found, whole = (one.choices[0].message.tool_calls for one in (rebuilt, completion(**asked)))
    assert [call.function.model_dump() for call in found] == [call.function.model_dump() for call in whole]


def test_results_of_tools_go_back(options: dict[str, Any]) -> None:
    called = (
        completion(messages=ASKED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **options)
        .choices[0]
        .message
    )
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in called.tool_calls]
    for returned in (called, called.model_dump()):
        answer = completion(messages=[*ASKED, returned, *results], tools=[TOOL], **options).choices[0].message
        assert answer.content or answer.tool_calls


def test_responses(options: dict[str, Any]) -> None:
    where = {name: options[name] for name in ("model", "api_base", "api_key")}
    answer = responses(input=QUESTION, max_output_tokens=32, temperature=0, **where)
    assert answer.output[-1].content[0].text


def test_errors_are_typed(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        completion(messages=ASKED, top_p=-1, **options)
    with pytest.raises(litellm.ContextWindowExceededError):
        completion(messages=[{"role": "user", "content": "word " * 4000}], **options)
    with pytest.raises(litellm.AuthenticationError):
        completion(messages=ASKED, **{**options, "api_key": "sk-wrong"})
    with pytest.raises(litellm.NotFoundError):
        completion(messages=ASKED, **{**options, "model": "openai/another"})
