"""Bodies: what is read as JSON, how long its lists and numbers may be, and that a refusal costs little."""

from typing import Any

import pytest

from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.posting import CHAT, COMPLETE, PROMPT, error_of, post

NO_JSON = [
    b"",
    b"{",
    b"[]",
    b"5",
    b'"text"',
    b"null",
    b'{"prompt": "a",}',
    b'{"prompt": "a"} {}',
    b"{'prompt': 'a'}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b"\xef\xbb\xbf" + b'{"prompt": "a"}',
    b"\x00",
]


@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: repr(body[:32]))
def test_what_is_no_json_or_no_object_is_a_400(body: bytes) -> None:
    response = post(COMPLETE, body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_body_that_is_wrong_all_over_is_not_gone_through() -> None:
    error = error_of(post(COMPLETE, {"prompt": "a", **{f"unknown_{i}": i for i in range(5000)}}))
    assert "5000 places" in error["message"]


@pytest.mark.parametrize("digits", [400, 4299, 4300, 4301])
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_numbers_of_thousands_of_digits_are_refused(digits: int, sign: bytes) -> None:
    for field in (b"max_tokens", b"temperature", b"unknown", b"model"):
        response = post(COMPLETE, b'{"prompt": "a", "' + field + b'": ' + sign + b"9" * digits + b"}")
        assert response.status_code == 400
        assert len(error_of(response)["message"]) < 200


def test_of_a_field_given_twice_the_last_counts() -> None:
    engine = FakeEngine()
    assert post(COMPLETE, b'{"prompt": "a", "max_tokens": 9, "max_tokens": 2}', engine).status_code == 200
    assert engine.submitted[0].params.max_tokens == 2


# Lists.

USER: dict[str, Any] = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {"prompt": [-1] * 5000}, "prompt.0"),
        (COMPLETE, {"prompt": [[-1] * 5000]}, "prompt.0.0"),
        (COMPLETE, {"prompt": [[]] * 5000}, "prompt.0"),
        (COMPLETE, {"prompt": [""] * 5000}, "prompt.0"),
        (CHAT, {"messages": [{"role": "user", "content": 5}] * 5000}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [5] * 5000}]}, "messages.0.content.0"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}] * 5000}, "messages.0.content"),
        ("/detokenize", {"tokens": [-1] * 5000}, "tokens.0"),
    ],
)
def test_a_long_list_is_refused_with_the_first_that_is_wrong_in_it(path: str, body: object, param: str) -> None:
    """To find all the other faults would delay every client."""
    error = error_of(post(path, body))
    assert error["param"] == param
    assert "more)" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETE, {"prompt": ["a"] * 9}, "prompt: at most 8 are allowed, got 9"),
        (COMPLETE, {"prompt": []}, "prompt: at least 1 needed, got 0"),
        (COMPLETE, {**PROMPT, "stop": ["a"] * 17}, "stop: at most 16 are allowed, got 17"),
        (
            COMPLETE,
            {**PROMPT, "logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "logit_bias: at most 1024 are allowed, got more",
        ),
        (CHAT, {"messages": [USER] * 5000}, "messages: at most 4096 are allowed, got 5000"),
        (COMPLETE, {"prompt": ""}, "prompt: String should have at least 1 character, got 0"),
        (COMPLETE, {**PROMPT, "user": "x" * 300}, "user: String should have at most 256 characters, got 300"),
    ],
)
def test_a_list_that_is_too_long_is_refused_with_both_lengths(path: str, body: object, said: str) -> None:
    assert error_of(post(path, body))["message"] == said


def test_the_parts_of_all_messages_are_counted_together() -> None:
    def content(parts: int) -> dict[str, Any]:
        return {"role": "user", "content": [PART] * parts}

    error = error_of(post(CHAT, {"messages": [content(1000), USER, content(25)]}))
    assert error["param"] == "messages"
    assert "1024 text parts" in error["message"]
    tokens = post("/tokenize", {"messages": [content(1000), USER, content(24)]})
    assert tokens.status_code == 200
