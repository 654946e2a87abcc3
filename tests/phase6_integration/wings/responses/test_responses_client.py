"""/v1/responses by the official client, against a running server with the bundled model."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.application import ENGINE
from tests.phase6_integration.fake_engine import served

KEY = "sk-of-the-test"
WHERE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": WHERE}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    options = EngineOptions(kv_cache_pages=256, max_num_seqs=16, threads=1)
    settings = ServerSettings(api_keys=(KEY,))
    with (
        served(lambda: AsyncEngine(options, factory=ENGINE), settings) as url,
        OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


GREEDY: Any = {"model": "tiny_chat", "temperature": 0, "max_output_tokens": 24}


def test_the_client_creates_and_streams_the_same_answer(client: OpenAI) -> None:
    whole = client.responses.create(input="What is paging?", **GREEDY)
    events = list(client.responses.create(input="What is paging?", stream=True, **GREEDY))
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "What is paging?"}], model="tiny_chat", temperature=0, max_tokens=24
    )
    assert whole.output_text == chat.choices[0].message.content != ""
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text


def test_the_output_of_the_client_is_input_of_the_next_turn(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is paging?"}]
    first = client.responses.create(input=asked, **GREEDY)
    dumped = [item.model_dump(exclude_unset=True) for item in first.output]
    for back in (first.output, dumped):
        again = client.responses.create(input=[*asked, *back, {"role": "user", "content": "Go on."}], **GREEDY)
        assert again.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="Go on.", previous_response_id=first.id, **GREEDY)


class City(BaseModel):
    name: Literal["Rome", "Paris"]
    big: bool


def test_the_client_parses_an_answer_into_a_model(client: OpenAI) -> None:
    assert client.responses.parse(input="A city?", model="tiny_chat", text_format=City).output_parsed is not None
    with client.responses.stream(input="A city?", model="tiny_chat", text_format=City) as stream:
        for _ in stream:
            continue
        assert stream.get_final_response().output_parsed is not None


def test_a_required_call_is_an_item_and_its_output_is_input(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "The weather in Rome?"}]
    tools: Any = [{**TOOL, "strict": True}]
    given: Any = {"model": "tiny_chat", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(input=asked, **given)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Bern")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    again = client.responses.create(input=[*asked, *first.output, result], model="tiny_chat", tools=tools)
    assert again.status in ("completed", "incomplete")
