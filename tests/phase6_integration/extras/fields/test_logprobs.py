"""Logprobs and echoes: in the shapes of OpenAI's two APIs, beside their tokens, whole and in a stream."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from phase0_request.params import SamplingParams, TokenLogprobs
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.streaming import PIECE
from phase6_integration.app import create_app
from phase6_integration.extras.fields.logprobs import TokenNames, for_chat, for_completion, prompt_offsets
from phase6_integration.extras.fields.token_details import LogprobArrays, TokenDetails, details_of
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration import answer_schemas
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, events, report, says
from tests.phase6_integration.real_engine import PROMPTS, OnTheEngine, read, request, shared
from tests.phase6_integration.streams import HELLO, PATHS, body, post, run, text_of

TOKENIZER = Tokenizer.from_pretrained()
COMPLETE, CHAT = PATHS
EMOJI = "caf\u00e9 \U0001f600 ok"
SCHEMAS = {
    COMPLETE: (answer_schemas.completion, answer_schemas.completion_chunk),
    CHAT: (answer_schemas.chat, answer_schemas.chat_chunk),
}


def answer(engine: FakeEngine, path: str, **asked: Any) -> Any:
    response = post(engine, path, **{**({"messages": HELLO} if path == CHAT else {}), **asked})
    assert response.status_code == 200, response.text
    return SCHEMAS[path][0](response.content)


def chunks(engine: FakeEngine, path: str, **asked: Any) -> list[Any]:
    response = post(engine, path, stream=True, **{**({"messages": HELLO} if path == CHAT else {}), **asked})
    *data, done = events(response.content)
    assert done == "[DONE]"
    return [SCHEMAS[path][1](one) for one in data]


@pytest.fixture(scope="module")
def on_the_engine() -> Iterator[OnTheEngine]:
    """Runs a test on the bundled model."""
    with shared("requests_fail") as run_on:
        yield run_on


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hello there", [5, 6, 7], EMOJI])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_an_echo_is_the_prompt_and_what_it_is_made_of(stream: bool, prompt: Any, logprobs: int | None) -> None:
    tokens = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    said = TOKENIZER.encode(" and more")
    asked = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": len(said)}
    engine = FakeEngine(lambda _: said)
    if stream:
        pieces = [one.choices[0] for one in chunks(engine, COMPLETE, **asked)]
        text = "".join(piece.text for piece in pieces)
        found = [piece.logprobs for piece in pieces]
    else:
        (choice,) = answer(engine, COMPLETE, **asked).choices
        text, found = choice.text, [choice.logprobs]
    assert text == TOKENIZER.decode(tokens) + " and more"
    assert engine.submitted[0].params.prompt_logprobs == logprobs
    if logprobs is None:
        assert found == [None] * len(found)
        return
    names = TokenNames(TOKENIZER)
    assert [token for one in found if one for token in one.tokens] == [names[t].text for t in [*tokens, *said]]
    values = [value for one in found if one for value in one.token_logprobs]
    assert values == [None] + [-1.0] * (len(tokens) + len(said) - 1)
    tops = [top for one in found if one for top in one.top_logprobs]
    assert tops[0] is None
    assert {len(top) for top in tops[1:] if top is not None} == {max(logprobs, 1)}
    offsets = [offset for one in found if one for offset in one.text_offset]
    assert offsets == sorted(offsets)
    for token, offset in zip([*tokens, *said], offsets, strict=True):
        name = names[token].text
        assert name.startswith("bytes:") or text[offset:].startswith(name)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_the_prompt_alone(stream: bool) -> None:
    asked = {"prompt": "Hello there", "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
    engine = FakeEngine()
    if stream:
        *pieces, last = chunks(engine, COMPLETE, stream_options={"include_usage": True}, **asked)
        choices: list[Any] = [piece.choices[0] for piece in pieces]
        usage = last.usage
    else:
        done = answer(engine, COMPLETE, **asked)
        choices, usage = list(done.choices), done.usage
    assert [choice.text for choice in choices] == ["Hello there"] * 2
    assert [choice.finish_reason for choice in choices] == ["length"] * 2
    assert {tuple(choice.logprobs.tokens) for choice in choices} == {("Hello", " there")}
    assert usage is not None
    assert usage.completion_tokens == 0
    assert {one.params.max_tokens for one in engine.submitted} == {1}


@pytest.mark.parametrize("asked", [{}, {"echo": True}])
def test_a_long_response_is_sent_while_it_is_encoded(asked: dict[str, Any]) -> None:
    """Other requests have a turn between its pieces, and it is never whole in memory."""

    async def test() -> None:
        turns = 0
        async with Call(create_app(FakeEngine(), ServerSettings()), "/v1/completions", body) as call:
            while not call.complete:
                turns += call.sends > 0
                await asyncio.sleep(0)
        assert call.sends >= 3
        assert turns >= 2
        assert "content-length" not in call.headers
        assert len(answer_schemas.completion(call.content).choices) == 3

    body = {"prompt": [5, 6] * 150, "max_tokens": 300, "logprobs": 20, "n": 3, **asked}
    asyncio.run(test())


def test_tokens_are_called_by_their_text_their_name_or_their_bytes() -> None:
    names = TokenNames(TOKENIZER)
    end = min(TOKENIZER.eos_ids)
    word, *_ = TOKENIZER.encode("Hello")
    assert names[word] == ("Hello", list(b"Hello"))
    assert names[end].bytes is None
    assert names[end].text in ("<|im_end|>", "<|endoftext|>")
    parts = TOKENIZER.encode("\U0001f600")
    assert len(parts) > 1
    assert [value for part in parts for value in names[part].bytes or []] == list("\U0001f600".encode())
    for part in parts:
        content = TOKENIZER.token_bytes(part)
        assert names[part].text == "bytes:" + "".join(f"\\x{value:02x}" for value in content)
    assert names[100_000] == ("token_id:100000", None), "models have more rows than tokenizers have tokens"
    assert TokenNames(None)[5] == ("token_id:5", None)


def test_where_the_tokens_of_a_prompt_begin() -> None:
    text = f"one{EMOJI}<|im_end|>two"
    tokens = TOKENIZER.encode(text)
    offsets = prompt_offsets(TOKENIZER, tokens, text)
    assert text[offsets[tokens.index(2)] :].startswith("<|im_end|>two")
    assert offsets == sorted(offsets)
    rebuilt = "".join(text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True))
    assert rebuilt == text


def test_a_logprob_of_minus_infinity_has_a_number() -> None:
    never = TokenLogprobs(float("-inf"), ((5, -0.5),))
    names = TokenNames(TOKENIZER)
    found = for_completion(names, [6], [never], [0], 1)
    assert [*found["token_logprobs"]] == [-9999.0]
    assert next(found["top_logprobs"])[names[6].text] == -9999.0
    assert json.loads(json.dumps([*for_chat(names, [6], [never])], allow_nan=False))[0]["logprob"] == -9999.0


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    def without() -> FakeEngine:
        engine = FakeEngine(lambda _: [5, 6])
        engine.tokenizer = None
        return engine

    done = answer(without(), COMPLETE, prompt=[1, 2], max_tokens=2, logprobs=1)
    assert done.choices[0].text == ""
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.tokens == ["token_id:5", "token_id:6"]
    (only,) = chunks(without(), COMPLETE, prompt=[1, 2], max_tokens=2, logprobs=1)
    assert only.choices[0].finish_reason == "length", "no chunk is empty, so there is one"
    assert only.choices[0].logprobs == done.choices[0].logprobs
    for asked in ({"prompt": "text"}, {"prompt": [1], "echo": True}):
        response = post(without(), COMPLETE, **asked)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tokenizer")


def test_no_chunk_is_empty_even_if_tokens_have_no_text() -> None:
    """Special tokens in the middle of an answer, when the end of it is ignored."""
    assert min(TOKENIZER.eos_ids) != 1
    tokens = FakeEngine(lambda _: [5, 1, 1, 6, 1])
    pieces = [one.choices[0] for one in chunks(tokens, COMPLETE, prompt="x", logprobs=0, max_tokens=5)]
    assert all(piece.text for piece in pieces[:-1])
    assert [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens][1:3] == ["<|im_start|>"] * 2
    assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(top: int | None, stream: bool) -> None:
    text = "caf\u00e9 \U0001f600"
    given = {"logprobs": True, "max_tokens": 50} | ({} if top is None else {"top_logprobs": top})
    engine = FakeEngine(says(text))
    if stream:
        found = [one.choices[0].logprobs for one in chunks(engine, CHAT, **given)]
    else:
        found = [answer(engine, CHAT, **given).choices[0].logprobs]
    entries = [entry for one in found if one is not None for entry in one.content]
    assert bytes(value for entry in entries for value in entry.bytes or []).decode() == text
    assert {entry.logprob for entry in entries} == {-1.0}
    assert {len(entry.top_logprobs) for entry in entries} == {top or 0}
    assert engine.submitted[0].params.logprobs == (top or 0)
    assert engine.submitted[0].params.prompt_logprobs is None
    assert any(entry.token.startswith("bytes:\\x") for entry in entries)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stream", "pieces"), [(True, 8), (False, 3)])
def test_others_have_turns_while_a_long_answer_with_logprobs_is_written(path: str, stream: bool, pieces: int) -> None:
    """All of it is there at once. Between two turns of the event loop an event or a block is written."""

    async def test() -> None:
        scored = {"logprobs": True, "top_logprobs": 20} if "chat" in path else {"logprobs": 20}
        engine = FakeEngine(lambda _: [40] * 300)
        asked = body(path, n=24, max_tokens=300, stream=stream, **scored)
        async with Call(create_app(engine, ServerSettings()), path, asked) as call:
            call.reads.clear()
            while not engine.submitted or engine.live or not call.waits:
                await asyncio.sleep(0)
            call.reads.set()
            seen = [len(call.content)]
            while not call.complete:
                await asyncio.sleep(0)
                seen.append(len(call.content))
        assert seen[-1] > 20 * PIECE
        assert max(later - earlier for earlier, later in pairwise(seen)) < pieces * PIECE

    run(test)


def test_what_has_gathered_is_joined() -> None:
    """While the client does not read, tokens gather in one chunk, and its logprobs stay beside them."""

    async def test() -> None:
        engine = FakeEngine()
        app = create_app(engine, ServerSettings())
        async with Call(app, PATHS[0], body(PATHS[0], stream=True, max_tokens=200, logprobs=2)) as call:
            await call.until(lambda call: call.sends >= 2)
            call.reads.clear()
            while engine.live:
                await asyncio.sleep(0)
            call.reads.set()
        assert len(call.events) < 100
        assert "".join(map(text_of, call.events[:-1])) == "Hello" * 200
        found = [event["choices"][0]["logprobs"] for event in call.events[:-1]]
        assert sum(len(one["top_logprobs"]) for one in found) == 200
        assert [offset for one in found for offset in one["text_offset"]] == list(range(0, 1000, 5))

    run(test)


@pytest.mark.parametrize("grammar", [None, 'start: "the pages of a cache"'], ids=["free", "forced"])
def test_prompts_are_scored(on_the_engine: OnTheEngine, grammar: str | None) -> None:
    """Also if a grammar forces tokens behind the first one of the output."""

    async def test(made: AsyncEngine) -> None:
        made.details = TokenDetails
        params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2, grammar=grammar)
        for name in ("first", "again"):
            reply = made.submit(request(name, PROMPTS[0], params))
            await read(reply)
            scores = details_of(reply.outputs[0]).prompt_logprobs
            assert scores is not None
            assert len(scores) == len(PROMPTS[0]) - 1
            assert all(score and len(score.top) == 2 and score.logprob <= 0 for score in scores)

    on_the_engine(test)


def test_a_prompt_that_is_only_echoed_leaves_room_for_a_token_too() -> None:
    engine = FakeEngine(max_model_len=64)
    error = post(engine, COMPLETE, prompt=[5] * 64, max_tokens=0, echo=True).json()["error"]
    assert (error["code"], error["param"], engine.submitted) == ("context_length_exceeded", "prompt", [])


def test_details_are_kept_until_their_tokens_are_written() -> None:
    details = TokenDetails()
    for number in range(5):
        said = report(TokenLogprobs(-float(number), ((number, -0.5),) * number), None if number else [], None)
        assert said is not None
        details.add(said)
    assert details.prompt_logprobs is not None
    taken = [[*details.take(count)] for count in (2, 0, 3)]
    assert [[one and (one.logprob, len(one.top)) for one in some] for some in taken] == [
        [(0.0, 0), (-1.0, 1)],
        [],
        [(-2.0, 2), (-3.0, 3), (-4.0, 4)],
    ]


def test_arrays_hold_what_was_put_into_them() -> None:
    found = [None, TokenLogprobs(-1.5, ((5, -0.5), (6, -2.0))), TokenLogprobs(-3.0, ())]
    arrays = LogprobArrays(found)
    arrays.extend(LogprobArrays(found[1:]))
    first = arrays.split(2)
    assert ([*first], [*arrays]) == (found[:2], [found[2], *found[1:]])
    assert (len(first), len(arrays)) == (2, 3)
