"""Hostile grammars, and the processes that check each grammar before it reaches the engine."""

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from phase6_integration.api.tokenization import Processes
from phase6_integration.process.tokenizer_process import Killed
from phase6_integration.wings.structured import grammar_pool as grammars
from tests.phase6_integration.cities import CITY, schema_format
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, PROMPT, error_of, post


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
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
    "deep grammar": {"guided_grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "new lines": {"guided_grammar": "\n" * 200_000},
    "chain of rules": {"guided_grammar": chain(9000)},
    "product of options": {"guided_json": {"allOf": OPTIONS}},
    "huge enum": {"guided_json": {"enum": [f"value {i}" for i in range(60_000)]}},
    "wide object": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    "long choices": {"guided_choice": ["a"] * 100_000},
    "deep schema": {"guided_json": json.dumps(nested(50)).replace("integer", "nothing")},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "SECONDS", 0.5)
    engine = FakeEngine()
    answer = post(COMPLETE, {**PROMPT, **HOSTILE[name]}, engine)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) < 500
    assert engine.submitted == []


def test_a_grammar_that_takes_its_whole_time_limit_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are a chat, and one with a grammar of its own."""
    order: list[str] = []

    async def test() -> None:
        async with client(FakeEngine()) as http:

            async def ask(name: str, path: str, **fields: Any) -> int:
                answer = await http.post(path, json={**BODIES[path], **fields})
                order.append(name)
                return int(answer.status_code)

            assert await ask("start", CHAT) == 200
            monkeypatch.setattr(grammars, "SECONDS", 0.2)
            await asyncio.gather(*(ask("start", CHAT, guided_grammar=chain(9000 - n)) for n in range(2)))
            monkeypatch.setattr(grammars, "SECONDS", 2.0)
            hostile = asyncio.create_task(ask("hostile", COMPLETE, guided_grammar=chain(8900)))
            await asyncio.sleep(0)
            others = await asyncio.gather(ask("chat", CHAT), ask("schema", CHAT, **schema_format(CITY)))
            assert (others, await hostile) == ([200, 200], 400)

    asyncio.run(test())
    assert order[-1] == "hostile"


def test_a_check_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "SECONDS", 0.02)
    error = error_of(post(COMPLETE, {**PROMPT, "guided_grammar": chain(9000)}))
    assert (error["param"], error["code"]) == ("guided_grammar", "conflicting_values")
    assert "took longer than 0.02 seconds" in error["message"]


def test_a_verdict_is_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    run = Processes.run

    async def counted(self: Processes, job: Any, tenant: str) -> Any:
        checked.append(job.grammar)
        return await run(self, job, tenant)

    monkeypatch.setattr(Processes, "run", counted)
    monkeypatch.setattr(grammars, "KEPT", 300)

    async def test() -> None:
        async with client(FakeEngine()) as http:
            for regex in ["a", "a", "(", "(", "b", "b" * 200, "a"]:
                answer = await http.post(COMPLETE, json={"prompt": [5], "max_tokens": 1, "guided_regex": regex})
                assert answer.status_code == (400 if regex == "(" else 200)

    asyncio.run(test())
    assert [len(grammar) for grammar in checked] == [
        len(LLMatcher.grammar_from_regex(r)) for r in ["a", "(", "b", "b" * 200, "a"]
    ]


def test_a_process_that_was_killed_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    run, killed = Processes.run, [1, 2, 3]

    async def mostly_killed(self: Processes, job: Any, tenant: str) -> Any:
        return Killed() if killed and killed.pop() else await run(self, job, tenant)

    monkeypatch.setattr(Processes, "run", mostly_killed)

    async def statuses() -> list[int]:
        async with client(FakeEngine()) as http:
            body = {"prompt": [5], "max_tokens": 1, "guided_regex": "killed"}
            return [(await http.post(COMPLETE, json=body)).status_code for _ in range(2)]

    assert asyncio.run(statuses()) == [400, 200], "killed twice, which is an error; then once, and asked again"
