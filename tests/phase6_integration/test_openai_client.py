"""The official client, as people use it, against a running server with the bundled model."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from phase0_request.request import FinishReason
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health
from tests.phase6_integration.application import ENGINE
from tests.phase6_integration.fake_engine import FakeEngine, Script, served

KEY = "sk-of-the-test"
CHAT: Any = [{"role": "user", "content": "What is paging?"}]
GREEDY: Any = {"model": "tiny_chat", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options = EngineOptions(kv_cache_pages=256, max_num_seqs=16, threads=1)
    settings = ServerSettings(api_keys=(KEY,), template_timeout=60)
    with served(lambda: AsyncEngine(options, factory=ENGINE), settings) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


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
    cut = client.chat.completions.create(messages=CHAT, tool_choice="required", **{**given, "max_tokens": 20})
    assert cut.choices[0].finish_reason == "length"
    for message in (parsed.message, streamed.message, cut.choices[0].message):
        calls = message.tool_calls or []
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "Noted."} for call in calls]
        for returned in (message, message.model_dump()):
            more = client.chat.completions.create(messages=[*CHAT, returned, *results], **given)
            assert more.choices[0].message.content or more.choices[0].message.tool_calls


def test_bad_words_are_not_said_and_only_allowed_tokens_are(client: OpenAI) -> None:
    text = client.chat.completions.create(messages=CHAT, **GREEDY).choices[0].message.content
    assert text
    words = [word.strip(".,") for word in text.split()[:3]]
    without = client.chat.completions.create(messages=CHAT, extra_body={"bad_words": words}, **GREEDY)
    said = without.choices[0].message.content
    assert said
    assert not [word for word in words if f" {word} " in f" {said} "]
    only = {"allowed_token_ids": [300, 301, 302], "return_token_ids": True}
    choice: Any = client.chat.completions.create(messages=CHAT, extra_body=only, **GREEDY).choices[0]
    assert {*choice.token_ids} <= {300, 301, 302}
    assert len(choice.token_ids) == 24


def test_a_streamed_chat_completion_is_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, **GREEDY)
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_of_the_client(client: OpenAI) -> None:
    to_the_end = {**GREEDY, "max_tokens": 1000}
    whole = client.chat.completions.create(messages=CHAT, **to_the_end)
    with client.chat.completions.stream(messages=CHAT, **to_the_end) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content


def test_a_completion_of_a_text_and_of_its_tokens(client: OpenAI, address: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    root = address.removesuffix("/v1")
    tokens = httpx.post(f"{root}/tokenize", json={"prompt": "Paging is"}, headers=headers).json()["tokens"]
    of_text = client.completions.create(prompt="Paging is", **GREEDY)
    of_tokens = client.completions.create(prompt=tokens, **GREEDY)
    assert of_text.choices[0].text == of_tokens.choices[0].text != ""
    assert of_text.usage is not None
    assert of_text.usage.prompt_tokens == len(tokens)
    back = httpx.post(f"{root}/detokenize", json={"tokens": tokens}, headers=headers).json()
    assert back == {"prompt": "Paging is"}


def test_a_prefix_is_cached(client: OpenAI) -> None:
    prompt = "The scheduler plans whose tokens are computed next, under one budget. " * 8
    client.completions.create(prompt=prompt, **GREEDY)
    done = client.completions.create(prompt=prompt, **GREEDY)
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    cached = done.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 16 <= cached < done.usage.prompt_tokens


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    done = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    (choice,) = done.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert "".join(bytes(entry.bytes or []).decode() for entry in entries) == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy"
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)


def test_logprobs_of_a_completion_with_its_prompt(client: OpenAI) -> None:
    done = client.completions.create(prompt="Paging ends", logprobs=2, echo=True, **GREEDY)
    (choice,) = done.choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    lengths = {len(found.tokens), len(found.token_logprobs), len(found.top_logprobs), len(found.text_offset)}
    assert len(lengths) == 1


REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any], str]] = [
    (openai.BadRequestError, {"temperature": -1}, "temperature"),
    (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}, "no_such_field"),
    (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (openai.BadRequestError, {"max_tokens": 5000}, "max_tokens"),
    (openai.BadRequestError, {"messages": []}, "messages"),
    (openai.NotFoundError, {"model": "another"}, "model"),
]


@pytest.mark.parametrize(("kind", "given", "param"), REFUSED, ids=[param for _, _, param in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_the_client_s_own_exceptions(
    client: OpenAI, kind: type[openai.APIStatusError], given: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as refusal:
        client.chat.completions.create(**{**GREEDY, "messages": CHAT, "stream": stream, **given})
    assert refusal.value.param == param
    assert refusal.value.request_id


def test_a_context_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(prompt=[7] * 3000, **GREEDY)
    assert refusal.value.code == "context_length_exceeded"
    assert "2048" in refusal.value.message
    assert "3000" in refusal.value.message


def test_a_wrong_key(address: str) -> None:
    with OpenAI(base_url=address, api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_many_streams_at_once_of_which_one_disconnects(address: str) -> None:
    async def test() -> None:
        async with AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            alone = await client.completions.create(prompt="Paging is", **GREEDY)
            left = await client.completions.create(prompt="Once", stream=True, **{**GREEDY, "max_tokens": 1000})
            async for _ in left:
                break
            await left.close()
            together = await asyncio.gather(
                *(client.completions.create(prompt="Paging is", **GREEDY) for _ in range(12)),
                *(in_pieces(client) for _ in range(12)),
            )
        texts = {one if isinstance(one, str) else one.choices[0].text for one in together}
        assert texts == {alone.choices[0].text}

    async def in_pieces(client: AsyncOpenAI) -> str:
        stream = await client.completions.create(prompt="Paging is", stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    asyncio.run(test())


def says_or(reason: FinishReason) -> Script:
    return lambda submit: [*submit.prompt_tokens, reason]


def broken(health: Health) -> FakeEngine:
    engine = FakeEngine()
    engine.health, engine.reason = health, "for a test"
    return engine


def full() -> FakeEngine:
    engine = FakeEngine(max_num_queued_reqs=1)
    engine._waiting.add("a waiting request")
    return engine


FAULTS: list[tuple[Any, type[openai.APIStatusError], int]] = [
    (full, openai.RateLimitError, 429),
    (lambda: broken(Health.LOADING), openai.InternalServerError, 503),
    (lambda: broken(Health.DRAINING), openai.InternalServerError, 503),
    (lambda: broken(Health.DEAD), openai.InternalServerError, 503),
    (lambda: FakeEngine(lambda _: [FinishReason.ERROR]), openai.InternalServerError, 500),
    (lambda: FakeEngine(lambda _: [FinishReason.TIMEOUT]), openai.APIStatusError, 408),
]


@pytest.mark.parametrize(("make", "kind", "status"), FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_have_a_status_and_say_when_to_come_again(
    make: Any, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    with (
        served(make) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(kind) as fault,
    ):
        client.completions.create(prompt="Hello", stream=stream, model="tiny_chat")
    assert fault.value.status_code == status
    assert ("retry-after" in fault.value.response.headers) == (status in (429, 503))
    assert "no client may see" not in fault.value.message


def test_a_fault_in_the_middle_of_a_stream_is_an_exception() -> None:
    with (
        served(lambda: FakeEngine(says_or(FinishReason.ERROR))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(prompt="Hello", stream=True, model="tiny_chat", max_tokens=9)
        assert next(stream).choices[0].text == "Hello"
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(stream)
