"""`--tokenizer`: a tokenizer and a chat template from another directory than the model."""

import asyncio
import shutil
from pathlib import Path

import pytest

from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase6_integration.engine.assemble import load_model
from phase6_integration.engine.options import EngineOptions
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase6_integration.fake_engine import FakeEngine, client

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The bundled tokenizer with another template, and nothing else."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}, other")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    saved(tiny_model("qwen3", vocab_size=4096), folder)
    assert not (folder / "tokenizer.json").exists()
    return folder


def test_requests_are_tokenized_with_it(other: Path, model: Path) -> None:
    async def main() -> FakeEngine:
        engine = FakeEngine(model=str(model), tokenizer=str(other))
        async with client(engine) as http:
            assert (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).status_code == 200
        return engine

    (asked,) = asyncio.run(main()).submitted
    assert asked.prompt_tokens == tuple(Tokenizer.from_pretrained().encode("hi, other"))


def test_an_engine_ends_answers_at_the_ends_of_both(other: Path, model: Path) -> None:
    own = load_model(EngineOptions(model=str(model), device="cpu"))
    both = load_model(EngineOptions(model=str(model), tokenizer=str(other), device="cpu"))
    assert own.tokenizer is None
    assert both.tokenizer is not None
    assert both.eos_ids == own.eos_ids | Tokenizer.from_pretrained(other).eos_ids != own.eos_ids


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(other: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    saved(tiny_model("qwen3", vocab_size=307), small)
    with pytest.raises(ValueError, match="the tokenizer has 4096 tokens and the model 307: not of one model"):
        load_model(EngineOptions(model=str(small), tokenizer=str(other), device="cpu"))


def test_a_directory_without_a_tokenizer_is_named(model: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        FakeEngine(model=str(model), tokenizer=str(model))
