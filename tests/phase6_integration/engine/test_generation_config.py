"""Sampling defaults of a model: those of its generation_config.json, for requests that do not say."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from phase0_request.params import SamplingParams
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.generation_config import sampling_defaults
from tests.phase6_integration.fake_engine import FakeEngine, client

QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "eos_token_id": [2, 0],
    "transformers_version": "5.17.0",
}


def model(folder: Path, **config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_the_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs = GenerationConfig.from_pretrained(model(tmp_path, **QWEN))
    found = sampling_defaults("auto", tmp_path)
    assert found == {name: getattr(theirs, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}


def test_where_the_defaults_come_from(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    own, other = model(tmp_path / "a", temperature=0.1, min_p=None, max_new_tokens=7), model(tmp_path / "b", top_k=5)
    assert sampling_defaults("auto", own) == {"temperature": 0.1, "max_tokens": 7}
    assert sampling_defaults("vllm", own) == {}
    assert sampling_defaults(str(other), own) == {"top_k": 5}
    assert sampling_defaults("auto", tmp_path) == {}, "a model without the file has none"
    assert sampling_defaults("auto", own, {"temperature": 0.9, "top_p": 0.5}) == {
        "temperature": 0.9, "top_p": 0.5, "max_tokens": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "config", "override", "words"),
    [
        ("auto", {"temperature": "hot"}, None, r"generation_config.json: temperature must be .* got 'hot'; --gen"),
        ("auto", {"top_p": 0}, None, "generation_config.json: top_p must be"),
        ("nowhere", {}, None, "generation_config must be auto, vllm or a directory with a generation_config.json"),
        ("auto", {}, {"top_k": 1.5}, "^override_generation_config: top_k must be an integer"),
        ("auto", {}, {"num_beams": 4}, "override_generation_config has values for temperature, .* not for num_beams"),
    ],
)
def test_a_wrong_default_is_an_error_at_the_start(
    source: str, config: Any, override: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        sampling_defaults(source, model(tmp_path, **config), override)


DEFAULTS = {"temperature": 0.25, "top_k": 9, "max_tokens": 3}


def submitted(path: str, body: dict[str, Any]) -> SamplingParams:
    """What the engine gets of a request to a server with defaults."""

    async def main() -> SamplingParams:
        engine = FakeEngine()
        async with client(engine, ServerSettings(sampling_defaults=DEFAULTS)) as http:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
        return engine.submitted[0].params

    return asyncio.run(main())


def test_a_request_that_does_not_say_gets_the_defaults() -> None:
    chat = submitted("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": None})
    assert (chat.temperature, chat.top_k, chat.top_p, chat.max_tokens) == (0.25, 9, 1.0, 3)
    completion = submitted("/v1/completions", {"prompt": "a", "top_k": 4})
    assert (completion.temperature, completion.top_k, completion.max_tokens) == (0.25, 4, 16)


def test_what_a_request_says_counts_also_beyond_the_defaults() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 50}
    params = submitted("/v1/chat/completions", body)
    assert (params.temperature, params.max_tokens) == (0, 50)
