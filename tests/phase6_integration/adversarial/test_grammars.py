"""Grammars of hostile clients, against a server with the bundled model: each ends its own request with a 400 that names
its field, and what other clients asked for meanwhile is answered."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from phase6_integration import connect
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.cities import CITY, schema_format
from tests.phase6_integration.fake_engine import served
from tests.phase6_integration.posting import COMPLETE, error_of

KEYS = ("one", "two")
PROMPT = {"prompt": "Hello", "max_tokens": 40, "temperature": 0}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "nothing"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


OPTIONS = [
    {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}, "type": "object"} for j in range(4)]} for i in range(6)
]


def chain(rules: int) -> str:
    """GBNF that the converter goes through once for each of its rules."""
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(rules)) + f'r{rules} ::= "a"'


HOSTILE: dict[str, dict[str, Any]] = {
    "regex of a million": {"guided_regex": "a{1000}{1000}"},
    "optional atoms": {"guided_regex": "a?" * 3000},
    "hidden behind a prefix": {"guided_regex": "x{3}a{1000}{1000}"},
    "deep regex": {"guided_regex": "(" * 50_000 + "a" + ")" * 50_000},
    "deep Lark": {"guided_grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "deep grammar": {"guided_grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "new lines": {"guided_grammar": "\n" * 200_000},
    "product of options": {"guided_json": {"allOf": OPTIONS}},
    "huge enum": {"guided_json": {"enum": [f"value {i}" for i in range(60_000)]}},
    "wide object": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    "long choices": {"guided_choice": ["a"] * 100_000},
    "deep schema": {"guided_json": json.dumps(nested(50))},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = EngineOptions(kv_cache_pages=256, max_num_seqs=16, threads=1)
    settings = connect.settings(api_keys=KEYS)
    with served(lambda: AsyncEngine(options), settings) as url:
        yield url


def ask(url: str, key: str, **fields: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(url + COMPLETE, json={**PROMPT, **fields}, headers=headers, timeout=120)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused(url: str, name: str) -> None:
    answer = ask(url, "one", **HOSTILE[name])
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert len(error["message"]) < 500
    assert [error["param"]] == [*HOSTILE[name]]


def test_grammars_that_take_their_whole_time_limit_delay_grammars_only_and_clients_take_turns(url: str) -> None:
    with ThreadPoolExecutor() as pool:
        hostile = [pool.submit(ask, url, "one", guided_grammar=chain(rules)) for rules in (9000, 9001)]
        assert ask(url, "two").status_code == 200
        assert not any(one.done() for one in hostile)
        assert ask(url, "two", **schema_format(CITY)).status_code == 200
        assert not all(one.done() for one in hostile)
        assert error_of(ask(url, "two", guided_regex="(a"))["param"] == "guided_regex"
        assert {error_of(one.result())["code"] for one in hostile} == {"grammar_too_complex"}


def test_a_stream_with_a_refused_grammar_is_a_400_too(url: str) -> None:
    answer = ask(url, "one", guided_regex="(a", stream=True, n=3)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "guided_regex")
    assert ask(url, "one", guided_regex="(a|b)", stream=True).text.endswith("data: [DONE]\n\n")
