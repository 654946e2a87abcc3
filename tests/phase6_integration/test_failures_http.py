"""What clients meet when something fails, over real sockets: an error in the one shape, an end to every stream, a
reason under /health, and nothing of what the exceptions said."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from phase6_integration import connect
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.engine.connect_engine import engine_options
from phase6_integration.extras.fields import told_fields
from phase6_integration.extras.fields.logprobs import for_completion
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.cities import TOKENIZER
from tests.phase6_integration.fake_engine import FakeEngine, served
from tests.phase6_integration.faults import NAN, POISON
from tests.phase6_integration.running import (
    Answer,
    Response,
    answer,
    ask,
    error_of,
    get,
    idle,
    line,
    parsed,
    request,
    run,
)

CHAT = "/v1/chat/completions"
PROMPTS = [list(range(20 + 3 * n, 60 + 3 * n, 2)) for n in range(6)]
LONG = 1900  # tokens: no request ends before something happens
TEST = Callable[[str], Coroutine[Any, Any, None]]


def token_of(text: str) -> int:
    [token] = TOKENIZER.encode(text, add_special_tokens=False)
    return token


def body(prompt: object = PROMPTS[0], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}


NEIGHBOUR = body(max_tokens=100)


def failing(fault: str = "", **options: Any) -> Callable[[], AsyncEngine]:
    """What makes an engine with a fault in it."""

    def make() -> AsyncEngine:
        given = {"kv_cache_pages": 512, "threads": 1, "check_invariants": True, "dtype": "float32", **options}
        given.setdefault("max_engine_restarts", 0)
        factory = {"factory": f"tests.phase6_integration.faults:{fault}"} if fault else {}
        return AsyncEngine(engine_options(**given), **factory)

    return make


def on_a_server(make: Callable[[], AsyncEngine], test: TEST, **settings: Any) -> None:
    with served(make, connect.settings(**settings)) as url:
        run(test(url))


def tells_nothing(response: Response) -> None:
    told = response.body.decode() + str(response.headers)
    for word in ("secret", "/home", "Traceback", "illegal memory", "a seat"):
        assert word not in told


def refused(response: Response, status: int, code: str) -> None:
    """It has this status, and says no more than it should."""
    tells_nothing(response)
    assert (response.status, response.error["code"]) == (status, code)
    if status == 503:
        assert int(response.headers["retry-after"]) > 0
    if status == 500:
        assert response.headers["x-request-id"] in response.error["message"]


def broken_off(response: Response, code: str) -> list[Any]:
    """A stream that began and then failed: the error, and [DONE]. What it had said until then."""
    assert response.status == 200
    tells_nothing(response)
    *chunks, failure, done = response.events
    assert done == "[DONE]"
    assert error_of(json.loads(failure))["code"] == code
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert all(choice["finish_reason"] is None for choice in choices)
    return choices


async def others(url: str) -> list[Answer]:
    found = await asyncio.gather(*(ask(url, body(p, stream=bool(n % 2))) for n, p in enumerate(PROMPTS)))
    return [answer(response) for response in found]


async def begins(url: str, asked: dict[str, Any], begun: asyncio.Semaphore) -> Response:
    """A stream, to its end. `begun` once its first event is there."""
    async with line(url, request(asked | {"stream": True})) as reader:
        head = await reader.readuntil(b"data: ")
        begun.release()
        return parsed(head + await reader.read())


async def ends(url: str) -> Counter[str]:
    """How answers have ended, once no request is live."""
    return Counter((await idle(url))["requests"]["finished"])


@pytest.fixture(scope="module")
def faulty() -> Iterator[str]:
    """The address of a server on which three kinds of requests fail."""
    with served(failing("requests_fail")) as url:
        yield url


@pytest.fixture(scope="module")
def wanted(faulty: str) -> list[Answer]:
    """What it answers while no request fails: the others, and the neighbour."""

    async def ask_all() -> list[Answer]:
        return [*await others(faulty), answer(await ask(faulty, NEIGHBOUR))]

    return run(ask_all())


# One request fails.


@pytest.mark.parametrize(
    "victim",
    [body([*PROMPTS[0], POISON, 9]), body([*PROMPTS[0], NAN]), body(top_k=13, temperature=1.0)],
    ids=["the model raises", "the model says NaN", "the sampler raises"],
)
def test_a_request_that_makes_a_step_fail_gets_a_500_alone(
    victim: dict[str, Any], faulty: str, wanted: list[Answer]
) -> None:
    async def test(url: str) -> None:
        begun, before = asyncio.Semaphore(0), await ends(url)
        beside = asyncio.create_task(begins(url, NEIGHBOUR, begun))
        await begun.acquire()  # from here on there is no step without it
        for stream in (False, True):
            refused(await ask(url, victim | {"stream": stream}), 500, "internal_error")
        assert [*await others(url), answer(await beside)] == wanted
        assert (await get(url, "/health")).status == 200
        assert (await ends(url)) - before == {"error": 2, "length": len(PROMPTS) + 1}

    run(test(faulty))


# One request leaves no token.

YES = {"structured_outputs": {"choice": ["yes"]}}
SPELLS = ["y", "ye", "yes"]
IMPOSSIBLE: list[tuple[dict[str, Any], list[str]]] = [
    (YES | {"allowed_token_ids": [9]}, ["structured_outputs.choice", "allowed_token_ids"]),
    ({"guided_choice": ["yes"], "bad_words": SPELLS}, ["guided_choice", "bad_words"]),
    ({"response_format": {"type": "json_object"}, "bad_words": ["{", '{"', "{\n"]}, ["response_format", "bad_words"]),
    ({"allowed_token_ids": [token_of("y")], "bad_words": ["y"]}, ["allowed_token_ids", "bad_words"]),
]


@pytest.mark.parametrize(("fields", "names"), IMPOSSIBLE)
def test_fields_that_leave_no_token_are_a_400_that_names_them(
    fields: dict[str, Any], names: list[str], faulty: str
) -> None:
    async def test(url: str) -> None:
        for stream in (False, True):
            response = await ask(url, body("Hello", stream=stream, **fields))
            refused(response, 400, "no_token_left")
            assert response.error["type"] == "invalid_request_error"
            assert all(name in response.error["message"] for name in [*names, "after 0 tokens"])

    run(test(faulty))


def test_a_stream_in_which_no_token_is_left_says_which_fields_exclude_them(faulty: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", "stream": True}
    asked = {"text": {"format": {"type": "json_object"}}, "input": "a", "stream": True, "bad_words": ["{", '{"', "{\n"]}

    async def test(url: str) -> None:
        letters = {"guided_regex": "ab[xyz]", "allowed_token_ids": [token_of("a"), token_of("b")]}
        response = await ask(url, body("Hello", stream=True, **letters))
        said = broken_off(response, "no_token_left")
        assert "".join(choice["text"] for choice in said) == "ab"
        assert "after 2 tokens" in response.body.decode()
        assert (await ask(url, called | {"allowed_token_ids": [9]}, CHAT)).error["param"] == "tools"
        assert (await ask(url, asked, "/v1/responses")).error["param"] == "text.format"
        failed = (await ask(url, letters | {"input": "a", "stream": True}, "/v1/responses")).body.decode()
        assert '"status":"failed","error":{"code":"invalid_prompt"' in failed

    run(test(faulty))


def test_of_several_choices_that_fail_together_a_client_hears_once(faulty: str) -> None:
    async def test(url: str) -> None:
        before = await ends(url)
        for stream in (False, True):
            failed = await ask(url, body([PROMPTS[0], [*PROMPTS[1], NAN]], n=3, max_tokens=LONG, stream=stream))
            if stream and failed.status == 200:  # the sound prompt was first, and its first word is on its way
                broken_off(failed, "internal_error")
            else:
                refused(failed, 500, "internal_error")
            ended = await ends(url) - before
        assert ended["error"] >= 2
        assert ended["error"] + ended["abort"] == ended.total() == 12, "all choices of the request end"

    run(test(faulty))


# The HTTP process fails.


def raises(*_: object) -> Any:
    raise RuntimeError("secret: no words")


def test_a_fault_before_an_answer_is_a_500_and_a_fault_within_it_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tokenizer, of what writes an answer down, and of the text of a token. Other requests go on."""
    calls, engine = itertools.count(), FakeEngine()  # which says the prompt again
    assert engine.tokenizer is not None
    sound = engine.tokenizer.token_bytes
    poisoned = body([300] * 150 + [POISON], max_tokens=200)

    def sixth_raises(*arguments: Any) -> Any:
        return for_completion(*arguments) if next(calls) < 5 else raises()

    def poison_raises(token: int, skip_special_tokens: bool = True) -> bytes:
        return raises() if token == POISON else sound(token, skip_special_tokens)

    async def test(url: str) -> None:
        for method, path, asked in (
            ("encode", "/v1/completions", {"prompt": "Hello", "stream": True}),
            ("chat", CHAT, {"messages": [{"role": "user", "content": "Hello"}]}),
            ("decode", "/detokenize", {"tokens": [5]}),
        ):
            with monkeypatch.context() as fault:
                fault.setattr(TokenizerPool, method, raises)
                refused(await ask(url, asked, path), 500, "internal_error")
        for place, name, fails, asked, said in (
            (told_fields, "for_completion", raises, body(logprobs=1, max_tokens=3), 0),
            (told_fields, "for_completion", sixth_raises, body(logprobs=1, max_tokens=LONG, stream=True), 5),
            (engine.tokenizer, "token_bytes", poison_raises, poisoned, 0),
            (engine.tokenizer, "token_bytes", poison_raises, poisoned | {"stream": True}, 150),
        ):
            with monkeypatch.context() as fault:
                fault.setattr(place, name, fails)
                failed, sound_answers = await asyncio.gather(ask(url, asked), others(url))
            if said:
                assert len(broken_off(failed, "internal_error")) == said
            else:
                refused(failed, 500, "internal_error")
            assert {one.finish_reason for one in sound_answers} == {"length"}
            assert engine.live == 0
        assert len(engine.dropped) == 3, "the engine goes on with no answer that cannot be written down"

    on_a_server(lambda: engine, test)


# The engine fails.


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("light_hangs", "hung", "sent nothing for 1 seconds"),
        ("light_breaks", "dead", "the engine is dead: no step can be computed any more ("),
        ("light", "dead", "its process has ended"),
    ],
)
def test_when_the_engine_fails_every_request_gets_an_error(fault: str, code: str, words: str) -> None:
    async def test(url: str) -> None:
        begun = asyncio.Semaphore(0)
        streaming = [asyncio.create_task(begins(url, body(prompt, max_tokens=LONG), begun)) for prompt in PROMPTS]
        waiting = [asyncio.create_task(ask(url, body(prompt, max_tokens=LONG))) for prompt in PROMPTS]
        for _ in streaming:
            await begun.acquire()
        victims = [ask(url, body([*PROMPTS[0], POISON, 9], stream=stream)) for stream in (False, True)]
        for victim in await asyncio.gather(*victims):
            refused(victim, 503, code)
        for told in await asyncio.gather(*streaming):
            assert broken_off(told, code)
        for response in await asyncio.gather(*waiting):
            refused(response, 503, code)
        health = await get(url, "/health")
        refused(health, 503, code)
        assert words in health.error["message"]
        for late in await asyncio.gather(*(ask(url, body(stream=stream)) for stream in (False, True))):
            refused(late, 503, code)
        stats = json.loads((await get(url, "/stats")).body)
        assert (stats["requests"]["running"], stats["requests"]["waiting"], stats["pages"]["used"]) == (0, 0, 0)
        assert stats["health"] == code
        assert (await get(url, "/metrics")).status == 200

    on_a_server(failing(fault, hang_timeout=1.0), test)
