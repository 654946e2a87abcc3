"""The official client, as people use it, against a running server with the bundled model.

Some cases of structured output and tools are those of llama.cpp's server (formats) and of SGLang (EBNF, function
calling); the expectations are theirs.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from phase0_request.request import FinishReason
from phase6_integration import connect
from phase6_integration.engine.connect_engine import engine_options
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.fake_engine import FakeEngine, served

KEY = "sk-of-the-test"
CHAT: Any = [{"role": "user", "content": "What is paging?"}]
GREEDY: Any = {"model": "tiny_chat", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options = engine_options(kv_cache_pages=256, max_num_seqs=16, threads=1, speculative_config={"method": "ngram"})
    settings = connect.settings(api_keys=(KEY,))
    with served(lambda: AsyncEngine(options), settings) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def chat(client: OpenAI, **given: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"messages": CHAT, **GREEDY, **given})


# Text.


def test_a_chat_is_the_same_whole_streamed_and_by_the_stream_helper(client: OpenAI) -> None:
    (whole,), usage = (answer := chat(client, max_tokens=1000)).choices, answer.usage
    chunks = list(chat(client, max_tokens=1000, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.message.content
    assert [reason for chunk in chunks[:-1] if (reason := chunk.choices[0].finish_reason)] == [whole.finish_reason]
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    with client.chat.completions.stream(messages=CHAT, **{**GREEDY, "max_tokens": 1000}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.message.content


def test_a_predicted_answer_is_the_same_and_its_usage_tells_what_was_right(client: OpenAI) -> None:
    (plain,) = (answer := chat(client, max_tokens=1000)).choices
    assert answer.usage.completion_tokens_details is None
    text = plain.message.content
    edited = text.replace(text.split()[3], "something else", 1)
    counts = []
    for content in (text, [{"type": "text", "text": edited}], "Nothing of it."):
        prediction: Any = {"type": "content", "content": content}
        (choice,), usage = (answer := chat(client, max_tokens=1000, prediction=prediction)).choices, answer.usage
        assert choice.message.content == text
        counts.append(usage.completion_tokens_details)
    assert counts[0].accepted_prediction_tokens > counts[1].accepted_prediction_tokens > 5
    assert counts[0].rejected_prediction_tokens == 0 < counts[1].rejected_prediction_tokens
    assert counts[2].accepted_prediction_tokens == 0
    asked: Any = {"prediction": {"type": "content", "content": text}, "stream_options": {"include_usage": True}}
    *_, last = chat(client, max_tokens=1000, stream=True, **asked)
    assert last.usage.completion_tokens_details == counts[0]


# Typed answers.


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    people: Annotated[int, Field(ge=0, le=9_999_999)] | None
    kind: Literal["town", "city"]


def test_structured_output_is_parsed_however_hot_it_is_sampled(client: OpenAI) -> None:
    done = client.chat.completions.parse(
        model="tiny_chat", messages=CHAT, response_format=City, temperature=2, n=3, seed=0, max_tokens=300
    )
    assert [choice.finish_reason for choice in done.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, City) for choice in done.choices)
    (choice,) = client.completions.create(
        model="tiny_chat", prompt="Paging is", extra_body={"structured_outputs": {"choice": ["useful", "useless"]}}
    ).choices
    assert (choice.text in ("useful", "useless"), choice.finish_reason) == (True, "stop")


def test_a_typed_answer_that_is_cut_off_is_the_client_s_exception(client: OpenAI) -> None:
    given: Any = {**GREEDY, "max_tokens": 3, "messages": CHAT, "response_format": City}
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(**given)
    assert cut.value.completion.usage is not None
    assert cut.value.completion.usage.completion_tokens == 3
    with client.chat.completions.stream(**given) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()


# Tools.


def test_calls_of_tools_are_typed_and_go_back_with_their_results(client: OpenAI) -> None:
    """Whole, streamed, as a message and as its dump; also a call that was cut off."""
    tools: Any = [openai.pydantic_function_tool(City, description="Say what a city is.")]
    given: Any = {**GREEDY, "max_tokens": 200, "tools": tools, "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(messages=CHAT, tool_choice="required", **given).choices[0]
    with client.chat.completions.stream(messages=CHAT, tool_choice="required", **given) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (parsed, streamed):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.function.parsed_arguments == City.model_validate_json(call.function.arguments)
    cut = chat(client, tool_choice="required", **{**given, "max_tokens": 20})
    assert cut.choices[0].finish_reason == "length"
    for message in (parsed.message, streamed.message, cut.choices[0].message):
        calls = message.tool_calls or []
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "Noted."} for call in calls]
        for returned in (message, message.model_dump()):
            more = chat(client, **{**given, "messages": [*CHAT, returned, *results]})
            assert more.choices[0].message.content or more.choices[0].message.tool_calls


def function(name: str, kind: str = "integer", **more: Any) -> Any:
    numbers = {letter: {"type": kind, "description": "A number"} for letter in "ab"}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize("strict", [True, False])
def test_the_chosen_function_is_called_and_its_streamed_arguments_join_to_json(client: OpenAI, strict: bool) -> None:
    chosen = {"type": "function", "function": {"name": "add"}}
    tools = [function("sub", strict=strict), function("add", strict=strict)]
    given: Any = {"tools": tools, "tool_choice": chosen, "temperature": 1, "seed": 7, "max_tokens": 400}
    (whole,) = chat(client, **given).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **given)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == [whole.function.name] == ["add"]
    assert "".join(call.function.arguments or "" for call in calls) == whole.function.arguments
    assert all(isinstance(value, int) for value in json.loads(whole.function.arguments).values())
    assert not any(chunk.delta.content for chunk in chunks)


# /v1/responses.

WHERE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": WHERE}


RESPONSE: Any = {"model": "tiny_chat", "temperature": 0, "max_output_tokens": 24}


def test_the_client_creates_and_streams_the_same_answer(client: OpenAI) -> None:
    whole = client.responses.create(input="What is paging?", **RESPONSE)
    events = list(client.responses.create(input="What is paging?", stream=True, **RESPONSE))
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
    first = client.responses.create(input=asked, **RESPONSE)
    dumped = [item.model_dump(exclude_unset=True) for item in first.output]
    for back in (first.output, dumped):
        again = client.responses.create(input=[*asked, *back, {"role": "user", "content": "Go on."}], **RESPONSE)
        assert again.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="Go on.", previous_response_id=first.id, **RESPONSE)


class Place(BaseModel):
    name: Literal["Rome", "Paris"]
    big: bool


def test_the_client_parses_an_answer_into_a_model(client: OpenAI) -> None:
    assert client.responses.parse(input="A place?", model="tiny_chat", text_format=Place).output_parsed is not None
    with client.responses.stream(input="A place?", model="tiny_chat", text_format=Place) as stream:
        for _ in stream:
            continue
        assert stream.get_final_response().output_parsed is not None


def test_a_required_call_is_an_item_and_its_output_is_input(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "The weather in Rome?"}]
    tools: Any = [{**WEATHER, "strict": True}]
    given: Any = {"model": "tiny_chat", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(input=asked, **given)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Bern")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    again = client.responses.create(input=[*asked, *first.output, result], model="tiny_chat", tools=tools)
    assert again.status in ("completed", "incomplete")


# Errors.

REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any], str]] = [
    (openai.BadRequestError, {"temperature": -1}, "temperature"),
    (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}, "no_such_field"),
    (openai.BadRequestError, {"max_tokens": 5000}, "max_tokens"),
    (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 4000}]}, "messages"),
    (openai.NotFoundError, {"model": "another"}, "model"),
]


@pytest.mark.parametrize(("kind", "given", "param"), REFUSED, ids=[param for _, _, param in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_the_client_s_own_exceptions(
    client: OpenAI, kind: type[openai.APIStatusError], given: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as refusal:
        chat(client, stream=stream, **given)
    assert refusal.value.param == param
    assert refusal.value.request_id
    assert param != "messages" or refusal.value.code == "context_length_exceeded"


def test_a_wrong_key(address: str) -> None:
    with OpenAI(base_url=address, api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_fault_in_the_middle_of_a_stream_is_an_exception() -> None:
    with (
        served(lambda: FakeEngine(lambda request: [*request.prompt_tokens, FinishReason.ERROR])) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(prompt="Hello", stream=True, model="tiny_chat", max_tokens=9)
        assert next(stream).choices[0].text == "Hello"
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(stream)


# Embeddings.


def test_embeddings_are_the_same_in_both_encodings_and_alone_or_in_a_batch(client: OpenAI) -> None:
    texts = [f"What is paging? {number}" for number in range(64)]
    create: Any = client.embeddings.create
    default, floats = (create(model="tiny_chat", input=texts, **more) for more in ({}, {"encoding_format": "float"}))
    found = [[one.embedding for one in answer.data] for answer in (default, floats)]  # base64 by default
    assert found[0] == [pytest.approx(one) for one in found[1]]
    assert all(sum(number * number for number in one) == pytest.approx(1) for one in found[1])
    assert default.usage.prompt_tokens > 64
    alone = create(model="tiny_chat", input=texts[-1], encoding_format="float").data[0].embedding
    assert alone == pytest.approx(found[1][-1], abs=0.02), "of other shapes of batches, in bfloat16"
    with pytest.raises(openai.BadRequestError, match="embeddings of this model have"):
        create(model="tiny_chat", input="x", dimensions=100_000)
