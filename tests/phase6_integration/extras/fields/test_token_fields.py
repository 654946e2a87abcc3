"""The fields about tokens, in the shapes that vLLM documents: ids in answers, prompt logprobs, truncation, words
that are never said, special tokens, and the stop string as a part of the text."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras.fields import told_fields
from tests.phase6_integration import streams
from tests.phase6_integration.fake_engine import FakeEngine, Script

TOKENIZER = Tokenizer.from_pretrained()
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]
PROMPTS = {COMPLETE: TOKENIZER.encode("Hello there"), CHAT: TOKENIZER.chat(HELLO)}
BODIES: dict[str, dict[str, Any]] = {COMPLETE: {"prompt": PROMPTS[COMPLETE]}, CHAT: {"messages": HELLO}}
END, START = 2, 1  # <|im_end|>, which ends an answer, and <|im_start|>
SAID = TOKENIZER.encode("one two three")


def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> httpx2.Response:
    return streams.post(engine or FakeEngine(), path, **{**BODIES[path], "max_tokens": 40, **body})


def answer(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> dict[str, Any]:
    response = post(path, body, engine)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> dict[str, Any]:
    response = post(path, body, engine)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(path: str, body: dict[str, Any], engine: FakeEngine) -> list[dict[str, Any]]:
    return streams.chunks_of(post(path, {"stream": True, **body}, engine))


def text_of(choice: dict[str, Any]) -> str:
    inner = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text", inner.get("content", "")))


def script(*tokens: int) -> Script:
    return lambda _: list(tokens)


# Ids of tokens.

ENDINGS = [
    ({}, (*SAID, END), SAID, "stop"),
    ({"max_tokens": len(SAID)}, tuple(SAID), SAID, "length"),
    ({"stop_token_ids": [SAID[-1]]}, tuple(SAID), SAID[:-1], "stop"),
    ({"stop": " three"}, (*SAID, 500), SAID[:-1], "stop"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("asked", "said", "shown", "reason"), ENDINGS)
def test_the_ids_are_of_all_tokens_generated_with_those_that_ended_the_answer(
    path: str, asked: dict[str, Any], said: tuple[int, ...], shown: list[int], reason: str
) -> None:
    asked = {"return_token_ids": True, "n": 2, **asked}
    whole = answer(path, asked, FakeEngine(script(*said)))
    generated = whole["usage"]["completion_tokens"] // 2
    for choice in whole["choices"]:
        assert choice["token_ids"] == list(said[:generated])
        assert (text_of(choice), choice["finish_reason"]) == (TOKENIZER.decode(shown), reason)
    about = whole if path == CHAT else whole["choices"][1]
    assert about["prompt_token_ids"] == PROMPTS[path]

    chunks = streamed(path, asked, FakeEngine(script(*said)))
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for one in mine for token in one.get("token_ids", [])] == list(said[:generated])
        assert "".join(map(text_of, mine)) == TOKENIZER.decode(shown)
        if path == COMPLETE:
            assert mine[0]["prompt_token_ids"] == PROMPTS[path]
            assert all("prompt_token_ids" not in one for one in mine[1:])
    if path == CHAT:
        assert chunks[0]["prompt_token_ids"] == PROMPTS[path]
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


@pytest.mark.parametrize("path", BODIES)
def test_ids_that_are_not_requested_are_null_and_not_in_a_stream(path: str) -> None:
    whole = answer(path, {})
    about = whole if path == CHAT else whole["choices"][0]
    assert (about["prompt_token_ids"], about["prompt_logprobs"], whole["choices"][0]["token_ids"]) == (None, None, None)
    assert "token_ids" not in post(path, {"stream": True}).text


# Logprobs of the prompt.


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("most", [0, 2])
def test_prompt_logprobs_are_objects_by_token_id(path: str, most: int) -> None:
    """The engine of the tests gives each token a logprob of -1 and itself the first rank."""
    whole = answer(path, {"prompt_logprobs": most, "n": 2})
    for about in [whole] if path == CHAT else whole["choices"]:
        first, *others = about["prompt_logprobs"]
        assert first is None
        assert len(others) == len(PROMPTS[path]) - 1
        for token, found in zip(PROMPTS[path][1:], others, strict=True):
            assert list(found) == [str(token + i) for i in range(max(most, 1))]
            assert found[str(token)]["logprob"] == -1
            assert found[str(token)]["rank"] == (1 if most else None)
            text = TOKENIZER.decode([token]) or TOKENIZER.name(token)
            assert found[str(token)]["decoded_token"] == text or found[str(token)]["decoded_token"].startswith("bytes:")


@pytest.mark.parametrize(("echoed", "most"), [(0, 3), (3, 0), (2, 2)])
def test_prompt_logprobs_beside_an_echo_have_their_own_number_of_alternatives(echoed: int, most: int) -> None:
    engine = FakeEngine(script(*SAID, END))
    (choice,) = answer(COMPLETE, {"echo": True, "logprobs": echoed, "prompt_logprobs": most}, engine)["choices"]
    assert engine.submitted[0].params.prompt_logprobs == max(echoed, most)
    assert {len(one) for one in choice["prompt_logprobs"][1:]} == {max(most, 1)}
    assert {len(one) for one in choice["logprobs"]["top_logprobs"][1:]} == {max(echoed, 1)}
    assert len(choice["logprobs"]["tokens"]) == len(PROMPTS[COMPLETE]) + len(SAID)


def test_prompt_logprobs_of_a_single_token_are_null() -> None:
    assert answer(COMPLETE, {"prompt": [5], "prompt_logprobs": 1})["choices"][0]["prompt_logprobs"] == [None]


def test_prompt_logprobs_count_towards_the_limit_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_fields, "MAX_SCORES", 20)
    response = streams.post(FakeEngine(), COMPLETE, ServerSettings(), prompt=[5] * 7, prompt_logprobs=2)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt_logprobs", "conflicting_values")


# Truncation.

TEXT = "one two three four five six"
LONG = TOKENIZER.encode(TEXT)


@pytest.mark.parametrize("given", [TEXT, LONG, [TEXT, "one"], [LONG, LONG[:1]]])
@pytest.mark.parametrize("keep", [1, 3, len(LONG), 50])
def test_a_truncated_prompt_keeps_its_last_tokens(given: Any, keep: int) -> None:
    engine = FakeEngine(script(*SAID))
    whole = answer(COMPLETE, {"prompt": given, "truncate_prompt_tokens": keep, "echo": True, "max_tokens": 1}, engine)
    prompts = [LONG[-keep:], LONG[:1]][: len(whole["choices"])]
    assert [list(one.prompt_tokens) for one in engine.submitted] == prompts
    said = TOKENIZER.decode(SAID[:1])
    assert [choice["text"] for choice in whole["choices"]] == [TOKENIZER.decode(one) + said for one in prompts]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(("length", "left"), [(10, 54), (None, 64 - 16), (63, 1)])
def test_minus_one_keeps_what_fits_beside_the_answer(length: int | None, left: int) -> None:
    engine = FakeEngine(max_model_len=64)
    body = {"prompt": TEXT * 500, "truncate_prompt_tokens": -1, "max_tokens": length}
    assert answer(COMPLETE, body, engine)["usage"]["prompt_tokens"] == left
    asked = {"max_tokens": length, "truncate_prompt_tokens": -1, "messages": [{"role": "user", "content": TEXT * 500}]}
    expected = 63 if length is None else left
    assert answer(CHAT, asked, FakeEngine(max_model_len=64))["usage"]["prompt_tokens"] == expected


def test_a_truncation_that_does_not_fit_beside_the_answer_is_refused() -> None:
    for path in BODIES:
        error = refused(path, {"truncate_prompt_tokens": 60, "max_tokens": 10}, FakeEngine(max_model_len=64))
        assert error["param"] == "truncate_prompt_tokens"
        assert "54" in error["message"]
    assert refused(COMPLETE, {"truncate_prompt_tokens": 0})["code"] == "empty_prompt"


# What may be drawn.


def test_only_allowed_tokens_are_named_to_the_engine() -> None:
    engine = FakeEngine()
    answer(COMPLETE, {"allowed_token_ids": [5, 6]}, engine)
    assert engine.submitted[0].params == SamplingParams(max_tokens=40, allowed_token_ids=[5, 6])
    error = refused(COMPLETE, {"allowed_token_ids": [5, 5000]})
    assert (error["param"], error["code"]) == ("allowed_token_ids", "token_outside_vocabulary")


@pytest.mark.parametrize("path", BODIES)
def test_a_bad_word_is_bad_at_the_start_of_a_text_and_after_a_space(path: str) -> None:
    engine = FakeEngine()
    answer(path, {"bad_words": ["page", " cache", "\n", " "], "n": 2}, engine)
    forms = ["page", " page", "cache", " cache", "\n", " \n", " "]
    expected = tuple(tuple(TOKENIZER.encode(form, add_special_tokens=False)) for form in forms)
    assert [one.params.bad_words for one in engine.submitted] == [expected] * 2


# Special tokens.


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with a tokenizer that puts <|endoftext|>, token 0, in front of a text."""
    directory = tmp_path_factory.mktemp("models") / "with_bos"
    shutil.copytree(BUNDLED, directory)
    file: Path = directory / "tokenizer.json"
    described = json.loads(file.read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(described))
    return str(directory)


@pytest.mark.parametrize(("path", "default"), [(COMPLETE, True), (CHAT, False)])
@pytest.mark.parametrize("given", [None, False, True])
def test_special_tokens_around_a_prompt(with_bos: str, path: str, default: bool, given: bool | None) -> None:
    engine = FakeEngine(model=with_bos)
    text = {"prompt": "Hello there"} if path == COMPLETE else {}
    answer(path, {"add_special_tokens": given, **text}, engine)
    added = default if given is None else given
    assert list(engine.submitted[0].prompt_tokens) == [0] * added + PROMPTS[path]


MIXED = [START, *SAID[:2], END, START, *SAID[2:], 4095]
WRITTEN = f"<|im_start|>{TOKENIZER.decode(SAID[:2])}<|im_end|><|im_start|>{TOKENIZER.decode([*SAID[2:], 4095])}"


@pytest.mark.parametrize(("skip", "spaces"), [(None, None), (True, False), (False, True), (False, False)])
def test_special_tokens_are_written_or_skipped(skip: bool | None, spaces: bool | None) -> None:
    asked = {
        "ignore_eos": True,
        "logprobs": 0,
        "skip_special_tokens": skip,
        "spaces_between_special_tokens": spaces,
        "max_tokens": len(MIXED),
    }
    text = WRITTEN if skip is False else TOKENIZER.decode(MIXED)

    def engine() -> FakeEngine:
        made = FakeEngine(script(*MIXED))
        made.config = replace(made.config, eos_token_id=())  # the script ends by length
        return made

    (choice,) = answer(COMPLETE, asked, engine())["choices"]
    assert choice["text"] == text
    offsets = choice["logprobs"]["text_offset"]
    if skip is False:
        assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)][:1] == ["<|im_start|>"]
    pieces = [one["choices"][0] for one in streamed(COMPLETE, asked, engine())]
    assert "".join(piece["text"] for piece in pieces) == text
    assert [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]] == offsets


def test_the_token_that_ends_an_answer_is_not_written_unless_stops_are_included() -> None:
    for skip, include in product([False, True], repeat=2):
        asked = {"skip_special_tokens": skip, "include_stop_str_in_output": include, "logprobs": 0}
        (choice,) = answer(COMPLETE, asked, FakeEngine(script(*SAID, END)))["choices"]
        assert choice["text"] == "one two three" + "<|im_end|>" * (include and not skip)
        assert len(choice["logprobs"]["tokens"]) == len(SAID) + include


# Stop strings in the text.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", ["two", "e t", " three", ["x", "wo th"]])
def test_a_stop_string_may_be_included(stream: bool, echo: bool, stop: Any) -> None:
    text, (found,) = "one two three", [one for one in ([stop] if isinstance(stop, str) else stop) if one != "x"]
    asked = {"stop": stop, "include_stop_str_in_output": True, "logprobs": 0, "echo": echo, "n": 2}
    engine = FakeEngine(script(*SAID, 500, 600))
    expected = ("Hello there" if echo else "") + text[: text.index(found) + len(found)]
    if stream:
        choices = [one["choices"][0] for one in streamed(COMPLETE, asked, engine)]
    else:
        choices = answer(COMPLETE, asked, engine)["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, mine)) == expected
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == ("stop", found)
        offsets = [offset for one in mine for offset in one["logprobs"]["text_offset"]]
        tokens = [token for one in mine for token in one["logprobs"]["tokens"]]
        starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        assert offsets == starts, "the tokens are those of the text, and the last may go on"
        assert offsets[-1] < len(expected) <= offsets[-1] + len(tokens[-1])
