"""/v1/completions: what the engine is asked, and what is made of its answers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.logprobs import TokenNames, prompt_offsets
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app
from tests.phase6_integration import answer_schemas
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, client, events, says
from tests.phase6_integration.streams import post

TOKENIZER = Tokenizer.from_pretrained()
EMOJI = "caf\u00e9 \U0001f600 ok"


def complete(engine: FakeEngine, **body: Any) -> httpx.Response:
    return post(
        engine, "/v1/completions", ServerSettings(served_model_names=("first", "second"), max_choices=6), **body
    )


def answer(engine: FakeEngine, **body: Any) -> Any:
    response = complete(engine, **body)
    assert response.status_code == 200, response.text
    return answer_schemas.completion(response.content)


def chunks(engine: FakeEngine, **body: Any) -> list[Any]:
    *data, done = events(complete(engine, stream=True, **body).content)
    assert done == "[DONE]"
    return [answer_schemas.completion_chunk(one) for one in data]


def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine(scheduling_policy="priority")
    given: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["END", "end"],
        "stop_token_ids": [9, 10],
        "seed": 11,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logprobs": 2,
        "ignore_eos": True,
    }
    answer(engine, prompt="Hello", priority=-3, cache_salt="tenant", logit_bias={"5": -1.5}, **given)
    (asked,) = engine.submitted
    assert asked.params == SamplingParams(**given, logit_bias={5: -1.5})
    assert (asked.priority, asked.cache_salt) == (-3, "tenant")
    assert asked.prompt_tokens == tuple(TOKENIZER.encode("Hello"))


def test_what_is_not_given_is_the_default() -> None:
    engine = FakeEngine()
    answer(engine, prompt="Hello")
    (asked,) = engine.submitted
    assert asked.params == SamplingParams(max_tokens=16)
    assert (asked.priority, asked.cache_salt, engine.asked[0].timeout) == (0, "", 1800)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("Hello there", [TOKENIZER.encode("Hello there")]),
        (["Hello", "there"], [TOKENIZER.encode("Hello"), TOKENIZER.encode("there")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_the_four_forms_of_a_prompt(prompt: Any, tokens: list[list[int]], n: int) -> None:
    engine = FakeEngine()
    done = answer(engine, prompt=prompt, n=n, max_tokens=2)
    asked = sorted(engine.submitted, key=lambda one: int(one.id.rpartition("-")[2]))
    assert [list(one.prompt_tokens) for one in asked] == [tokens[i // n] for i in range(len(tokens) * n)]
    assert [choice.index for choice in done.choices] == list(range(len(tokens) * n))
    assert done.usage.prompt_tokens == sum(map(len, tokens)), "each prompt counts once"
    assert done.usage.completion_tokens == 2 * len(asked) == done.usage.total_tokens - done.usage.prompt_tokens


def test_samples_of_one_seed_have_seeds_of_their_own() -> None:
    engine = FakeEngine()
    answer(engine, prompt=["a", "b"], n=2, seed=(1 << 63) - 1, max_tokens=1)
    seeds = {one.id.rpartition("-")[2]: one.params.seed for one in engine.submitted}
    assert seeds == {"0": (1 << 63) - 1, "1": -(1 << 63), "2": (1 << 63) - 1, "3": -(1 << 63)}


def test_ids_are_the_client_s_and_still_unique_in_the_engine() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with client(engine) as http:
            body = {"prompt": "Hello", "request_id": "mine", "max_tokens": 2}
            one, other = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
            named = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "sane"})
        assert one.json()["id"] == other.json()["id"] == "cmpl-mine"
        assert named.json()["id"] == "cmpl-sane"
        assert len({asked.id for asked in engine.submitted}) == 3

    asyncio.run(test())


def test_a_response_carries_the_requested_model_name() -> None:
    assert answer(FakeEngine(), prompt="x").model == "first"
    assert answer(FakeEngine(), prompt="x", model="second").model == "second"
    assert complete(FakeEngine(), prompt="x", model="third").status_code == 404


def test_cached_tokens_count_once_a_prompt() -> None:
    engine = FakeEngine()
    engine.cached = 1
    usage = answer(engine, prompt=["Hello there", "Hello you"], n=3, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("script", "given", "text", "finish", "stop"),
    [
        (says("all of it"), {}, "all of it", "stop", None),
        (
            says("all of it", end=False),
            {"max_tokens": 2},
            TOKENIZER.decode(TOKENIZER.encode("all of it")[:2]),
            "length",
            None,
        ),
        (says("one two three"), {"stop": "two"}, "one ", "stop", "two"),
        (says("one two three"), {"stop": ["x", "thr"]}, "one two ", "stop", "thr"),
        (lambda _: [5, 6, 7], {"stop_token_ids": [7]}, TOKENIZER.decode([5, 6]), "stop", 7),
        (says(EMOJI), {}, EMOJI, "stop", None),
    ],
)
def test_how_an_answer_ends(script: Any, given: dict[str, Any], text: str, finish: str, stop: Any) -> None:
    asked = {"prompt": "Hello", "max_tokens": 50, **given}
    (choice,) = answer(FakeEngine(script), **asked).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, finish, stop)
    streamed = [one.choices[0] for one in chunks(FakeEngine(script), **asked)]
    assert "".join(one.text for one in streamed) == text
    assert [one.finish_reason for one in streamed if one.finish_reason] == [finish]
    assert streamed[-1].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hello there", [5, 6, 7], EMOJI])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_an_echo_is_the_prompt_and_what_it_is_made_of(stream: bool, prompt: Any, logprobs: int | None) -> None:
    tokens = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    said = TOKENIZER.encode(" and more")
    asked = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": len(said)}
    engine = FakeEngine(lambda _: said)
    if stream:
        pieces = [one.choices[0] for one in chunks(engine, **asked)]
        text = "".join(piece.text for piece in pieces)
        found = [piece.logprobs for piece in pieces]
    else:
        (choice,) = answer(engine, **asked).choices
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
        *pieces, last = chunks(engine, stream_options={"include_usage": True}, **asked)
        choices: list[Any] = [piece.choices[0] for piece in pieces]
        usage = last.usage
    else:
        done = answer(engine, **asked)
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
    from phase0_request.params import TokenLogprobs
    from phase6_integration.api.logprobs import for_chat, for_completion

    never = TokenLogprobs(float("-inf"), ((5, -0.5),))
    names = TokenNames(TOKENIZER)
    found = for_completion(names, [6], [never], [0], 1)
    assert [*found["token_logprobs"]] == [-9999.0]
    assert next(found["top_logprobs"])[names[6].text] == -9999.0
    assert json.loads(json.dumps([*for_chat(names, [6], [never])], allow_nan=False))[0]["logprob"] == -9999.0


LENGTHS: list[tuple[dict[str, Any], int | None]] = [
    ({"prompt": [5] * 63}, 1),
    ({"prompt": [5] * 60}, 4),
    ({"prompt": [5] * 10}, 16),
    ({"prompt": [5] * 10, "max_tokens": 54}, 54),
    ({"prompt": [5] * 10, "max_tokens": 55}, None),
    ({"prompt": [5] * 64}, None),
    ({"prompt": [5] * 64, "max_tokens": 0, "echo": True}, None),
    ({"prompt": [[5], [5] * 64]}, None),
]


@pytest.mark.parametrize(("given", "length"), LENGTHS)
def test_a_prompt_and_its_answer_fit_into_the_context(given: dict[str, Any], length: int | None) -> None:
    engine = FakeEngine(max_model_len=64)
    response = complete(engine, **given)
    if length is not None:
        assert response.status_code == 200
        assert engine.submitted[0].params.max_tokens == length
        return
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "64" in error["message"]
    assert (
        str(max(map(len, given["prompt"] if isinstance(given["prompt"][0], list) else [given["prompt"]])))
        in error["message"]
    )
    assert engine.submitted == [], "all or none"


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    def without() -> FakeEngine:
        engine = FakeEngine(lambda _: [5, 6])
        engine.tokenizer = None
        return engine

    done = answer(without(), prompt=[1, 2], max_tokens=2, logprobs=1)
    assert done.choices[0].text == ""
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.tokens == ["token_id:5", "token_id:6"]
    (only,) = chunks(without(), prompt=[1, 2], max_tokens=2, logprobs=1)
    assert only.choices[0].finish_reason == "length", "no chunk is empty, so there is one"
    assert only.choices[0].logprobs == done.choices[0].logprobs
    for asked in ({"prompt": "text"}, {"prompt": [1], "echo": True}):
        response = complete(without(), **asked)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tokenizer")


def test_no_chunk_is_empty_even_if_tokens_have_no_text() -> None:
    """Special tokens in the middle of an answer, when the end of it is ignored."""
    assert min(TOKENIZER.eos_ids) != 1
    tokens = FakeEngine(lambda _: [5, 1, 1, 6, 1])
    pieces = [one.choices[0] for one in chunks(tokens, prompt="x", logprobs=0, max_tokens=5)]
    assert all(piece.text for piece in pieces[:-1])
    assert [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens][1:3] == ["<|im_start|>"] * 2
    assert pieces[-1].finish_reason == "length"


def test_a_prompt_of_millions_of_characters_is_refused_before_it_is_split() -> None:
    engine = FakeEngine(max_model_len=64)
    assert engine.tokenizer is not None
    most = 64 * engine.tokenizer.longest
    engine.tokenizer.encode = None  # type: ignore[method-assign,assignment]
    error = complete(engine, prompt=["short", "x" * (most + 1)]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"64 tokens, {most} characters" in error["message"]
    assert f"got {most + 1}" in error["message"]


def test_no_prompt_that_fits_has_too_many_characters() -> None:
    engine = FakeEngine(max_model_len=64)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    longest = max(map(tokenizer.decode, ([token] for token in range(tokenizer.vocab_size))), key=len)
    prompt = longest * 63
    assert len(tokenizer.encode(prompt)) == 63
    assert complete(engine, prompt=prompt, max_tokens=1).status_code == 200
