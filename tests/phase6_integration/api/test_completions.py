"""/v1/completions: what the engine is asked, and what is made of its answers."""

import asyncio
from typing import Any

import httpx2
import pytest

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration import answer_schemas
from tests.phase6_integration.fake_engine import FakeEngine, client, events, says
from tests.phase6_integration.streams import post

TOKENIZER = Tokenizer.from_pretrained()
EMOJI = "caf\u00e9 \U0001f600 ok"


def complete(engine: FakeEngine, **body: Any) -> httpx2.Response:
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


LENGTHS: list[tuple[dict[str, Any], int | None]] = [
    ({"prompt": [5] * 63}, 1),
    ({"prompt": [5] * 60}, 4),
    ({"prompt": [5] * 10}, 16),
    ({"prompt": [5] * 10, "max_tokens": 54}, 54),
    ({"prompt": [5] * 10, "max_tokens": 55}, None),
    ({"prompt": [5] * 64}, None),
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
