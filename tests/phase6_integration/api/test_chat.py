"""/v1/chat/completions: conversations into tokens, and what is made of the answers."""

from importlib.util import find_spec
from typing import Any

import pytest

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import TokenizerPool
from tests.phase6_integration import answer_schemas
from tests.phase6_integration.fake_engine import FakeEngine, events, says
from tests.phase6_integration.streams import HELLO, post

HAS_EXTRAS = find_spec("phase6_integration.extras") is not None
TOKENIZER = Tokenizer.from_pretrained()
CHAT = "/v1/chat/completions"


def answer(engine: FakeEngine, **body: Any) -> Any:
    response = post(engine, CHAT, **{"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return answer_schemas.chat(response.content)


def chunks(engine: FakeEngine, **body: Any) -> list[Any]:
    *data, done = events(post(engine, CHAT, messages=HELLO, stream=True, **body).content)
    assert done == "[DONE]"
    return [answer_schemas.chat_chunk(one) for one in data]


def test_the_engine_gets_the_rendered_template() -> None:
    engine = FakeEngine()
    answer(engine, max_tokens=3)
    answer(engine, max_tokens=3, add_generation_prompt=False)
    asked, without = engine.submitted
    assert list(asked.prompt_tokens) == TOKENIZER.chat(HELLO)
    assert list(without.prompt_tokens) == TOKENIZER.chat(HELLO, add_generation_prompt=False)
    assert len(without.prompt_tokens) < len(asked.prompt_tokens)


def test_text_parts_are_lines_of_one_text() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer(engine, messages=[{"role": "user", "content": parts}], max_tokens=3)
    assert list(engine.submitted[0].prompt_tokens) == TOKENIZER.chat([{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, 2048 - len(TOKENIZER.chat(HELLO))),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_how_long_an_answer_may_be(given: dict[str, Any], length: int) -> None:
    engine = FakeEngine(says("yes"))
    assert len(answer(engine, **given).choices) == 1
    assert engine.submitted[0].params == SamplingParams(max_tokens=length)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_server_that_clips_gives_what_the_context_has_left(path: str) -> None:
    engine, asked = (
        FakeEngine(says("yes"), max_model_len=64),
        {"messages": HELLO} if path == CHAT else {"prompt": [5] * 40},
    )
    for length in (63, 65_536):
        response = post(engine, path, settings=ServerSettings(clip_max_tokens=True), max_tokens=length, **asked)
        assert response.status_code == 200
        request = engine.submitted[-1]
        assert len(request.prompt_tokens) + request.params.max_tokens == 64


def test_a_conversation_that_is_too_long() -> None:
    engine = FakeEngine(max_model_len=64)
    response = post(engine, CHAT, messages=[{"role": "user", "content": "word " * 100}])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    length = len(TOKENIZER.chat([{"role": "user", "content": "word " * 100}]))
    assert "64" in error["message"]
    assert str(length) in error["message"]


def test_a_conversation_of_millions_of_characters_is_refused_before_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(max_model_len=64)
    assert engine.tokenizer is not None
    monkeypatch.setattr(TokenizerPool, "chat", None)
    response = post(engine, CHAT, messages=[{"role": "user", "content": "word " * 100_000}] * 2)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert f"64 tokens, {64 * engine.tokenizer.longest} characters" in error["message"]
    assert "got 1000000" in error["message"]


WORDS = "word " * 100_000
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{WORDS}"}}'}}
LONG = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "description": WORDS}}]}
COUNTED = {"messages": [{"role": "user", "content": WORDS}]}


@pytest.mark.parametrize(
    ("path", "given"),
    [(CHAT, LONG), *([(CHAT, TOOLS), ("/v1/messages/count_tokens", COUNTED)] if HAS_EXTRAS else [])],
)
def test_a_rendered_conversation_that_cannot_fit_is_refused_before_it_is_encoded(
    path: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encode = FakeEngine(max_model_len=64), Tokenizer.encode

    def short(tokenizer: Tokenizer, text: str, *rest: Any, **more: Any) -> Any:
        assert len(text) < 64 * tokenizer.longest
        return encode(tokenizer, text, *rest, **more)

    monkeypatch.setattr(Tokenizer, "encode", short)
    response = post(engine, path, **{"messages": HELLO, **given})
    error = response.json()["error"]
    assert response.status_code == 400
    assert f"characters; at most {64 * TOKENIZER.longest} fit" in error["message"]
    assert path != CHAT or (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_conversation_that_is_truncated_may_be_longer_than_the_context() -> None:
    engine = FakeEngine(max_model_len=64)
    answer(engine, **LONG, truncate_prompt_tokens=10, max_tokens=3)
    assert len(engine.submitted[0].prompt_tokens) == 10


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_begins_with_its_role_right_before_its_first_text(n: int) -> None:
    events = [one.choices[0] for one in chunks(FakeEngine(says("yes")), n=n)]
    for index in range(n):
        first = next(place for place, one in enumerate(events) if one.index == index)
        role, text = events[first], events[first + 1]
        assert (role.delta.role, role.delta.content) == ("assistant", "")
        assert text.index == index
        assert text.delta.content
    assert sum(one.delta.role is not None for one in events) == n


def test_a_template_of_the_operator_is_the_one_that_counts() -> None:
    settings = ServerSettings(chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}")
    engine = FakeEngine()
    assert post(engine, CHAT, settings, messages=HELLO, max_tokens=2).status_code == 200
    assert list(engine.submitted[0].prompt_tokens) == TOKENIZER.encode("<Hello>", add_special_tokens=False)


def test_an_empty_template_is_none() -> None:
    response = post(FakeEngine(), CHAT, ServerSettings(chat_template=""), messages=HELLO)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "this model has no chat template" in error["message"]


KNOWN = """\
{%- for m in messages -%}
{%- if m.role in ('user', 'system', 'context') %}<{{ m.role }}>{{ m.content }}{% endif -%}
{%- endfor -%}
"""
COMPOSED = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
STRICT = KNOWN.replace("{% endif", "{% else %}{{ raise_exception('Unexpected role.') }}{% endif")


@pytest.mark.parametrize("path", [CHAT, *(["/tokenize"] if HAS_EXTRAS else [])])
@pytest.mark.parametrize(
    ("template", "role", "taken"),
    [
        (None, "critic", "critic"),
        (None, "developer", "system"),
        (KNOWN, "context", "context"),
        (KNOWN, "developer", "system"),
        (KNOWN.replace("context", "developer"), "developer", "developer"),
        (KNOWN, "critic", None),
        (STRICT, "critic", None),
        (STRICT, "context", "context"),
        (COMPOSED, "critic", "critic"),
        (COMPOSED, "endoftext", None),
    ],
)
def test_a_role_is_one_that_the_template_takes(path: str, template: str | None, role: str, taken: str | None) -> None:
    """Most templates leave out messages of a role that they do not know, and few know that of a developer."""
    settings = ServerSettings(chat_template=template)
    messages = [{"role": role, "content": "Be brief."}, *HELLO]
    response = post(engine := FakeEngine(), path, settings, messages=messages)
    if taken is None:
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages")
        assert "system, developer, user, assistant or tool" in error["message"]
        assert role not in error["message"]
        return
    assert response.status_code == 200, response.text
    found = response.json()["tokens"] if path == "/tokenize" else engine.submitted[0].prompt_tokens
    tokenizer = TOKENIZER.with_chat_template(template) if template else TOKENIZER
    assert list(found) == tokenizer.chat([{"role": taken, "content": "Be brief."}, *HELLO])


REFUSING = """\
{%- set what = messages[0].content -%}
{%- if what == 'roles' -%}{{ raise_exception('roles must alternate') }}
{%- elif what == 'undefined' -%}{{ messages[5].content.nothing }}
{%- elif what == 'sandbox' -%}{{ ''.__class__.__mro__ }}
{%- elif what == 'python' -%}{{ what + 1 }}
{%- endif -%}
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("roles", "messages: roles must alternate"),
        ("undefined", ""),
        ("sandbox", ""),
        ("python", "refused the messages"),
    ],
)
def test_a_template_that_refuses_is_a_400_in_its_own_words(what: str, why: str) -> None:
    """Those of Python are not for a client."""
    settings = ServerSettings(chat_template=REFUSING)
    response = post(FakeEngine(), CHAT, settings, messages=[{"role": "user", "content": what}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert why in error["message"]
    assert len(error["message"]) < 300
    assert "can only concatenate" not in error["message"]


def test_a_model_without_a_template_is_for_completions() -> None:
    engine = FakeEngine()
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = None
    response = post(engine, CHAT, messages=HELLO)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]
