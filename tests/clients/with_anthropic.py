"""Anthropic's client for Python, over /v1/messages: answers, streams, tools, its agent loop, formats and errors."""

from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel
from subject import CITIES, QUESTION, TOOL, Server, get_weather

WEATHER = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}  # a small model does not stop to call


@pytest.fixture
def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url.removesuffix("/v1"), api_key=server.key, max_retries=0)


@pytest.fixture
def asked(server: Server) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": server.model, "max_tokens": 128, "messages": messages, "extra_body": {"temperature": 0}}


def test_an_answer_and_its_usage(client: Anthropic, asked: dict[str, Any]) -> None:
    answer = client.messages.create(**asked, system="Be brief.")
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"], system="Be brief.")
    assert counted.input_tokens == read


def test_a_stream_and_a_conversation(client: Anthropic, asked: dict[str, Any]) -> None:
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    more = [*asked["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": "And?"}]
    assert client.messages.create(**{**asked, "messages": more}).content


def test_a_stop_sequence_ends_an_answer(client: Anthropic, asked: dict[str, Any]) -> None:
    text = client.messages.create(**asked).content[0].text
    stop = text[len(text) // 2 :][:4]
    answer = client.messages.create(**asked, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_and_its_result(client: Anthropic, asked: dict[str, Any], streamed: bool) -> None:
    calling = {**asked, "tools": [WEATHER], "tool_choice": ONE_CALL}
    if streamed:
        with client.messages.stream(**calling) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**calling)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
    more = [*asked["messages"], {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "messages": more, "tools": [WEATHER]}).content


def test_the_agent_loop_runs_a_tool_and_goes_on(client: Anthropic, asked: dict[str, Any]) -> None:
    seen = []

    @beta_tool(name="get_weather", description="Look up the weather of a city.", input_schema=WEATHER["input_schema"])
    def look_up(city: str) -> str:
        seen.append(city)
        return get_weather(city)  # type: ignore[arg-type]

    runner = client.beta.messages.tool_runner(**asked, tools=[look_up], tool_choice=ONE_CALL, max_iterations=2)
    answers = list(runner)
    assert len(answers) == 2
    assert seen
    assert {*seen} <= {*CITIES}


class Sky(BaseModel):
    """The client takes bounds of numbers out of a schema, so there are none here."""

    sky: Literal["clear", "cloudy", "rain"]
    windy: bool


def test_parsed_output_is_of_the_type(client: Anthropic, asked: dict[str, Any]) -> None:
    answer = client.messages.parse(**asked, output_format=Sky)
    assert isinstance(answer.parsed_output, Sky)


def test_errors_have_the_clients_types(server: Server, client: Anthropic, asked: dict[str, Any]) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**asked, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": 10_000}, timeout=60)
    wrong = Anthropic(base_url=server.url.removesuffix("/v1"), api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**asked)
