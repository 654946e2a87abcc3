"""`lab peers.real_models` on a small random model with the bundled tokenizer. transformers has the same tokens."""

import json
import re
from pathlib import Path

import pytest
import torch

from phase0_request.tokenizer import Tokenizer
from phase6_integration.lab.peers import real_models
from tests.gguf_files import saved_gguf
from tests.phase2_prefill_decode.models import tiny_model
from tests.phase2_prefill_decode.test_identity import follows


def test_a_model_is_as_transformers_has_it_and_a_fault_would_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name, value in {"PIECES": 20, "PASSAGE": 60, "ANSWER": 6, "QUESTIONS": real_models.QUESTIONS[:2]}.items():
        monkeypatch.setattr(real_models, name, value)
    file = tmp_path / "chat.gguf"
    size = Tokenizer.from_pretrained().vocab_size
    model = tiny_model("llama", vocab_size=size, max_position_embeddings=512, num_attention_heads=4, head_dim=16)
    saved_gguf(model, file, lambda name: "BF16", tokenizer=True)
    assert real_models.main([str(file), "--llama", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    said = capsys.readouterr().out
    assert "pip install llama-cpp-python" in said
    assert re.search(r"same tokens, of 22 texts +22\s", said)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]["chat"]
    assert figures["float32"]["greedy"] == 1.0
    assert real_models.wrong(figures) == []
    figures["transformers"] |= {"texts": 21, "nll": figures["float32"]["nll"] + 0.02}
    assert real_models.wrong(figures) == ["tokens of texts, transformers", "likelihood, transformers"]


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    assert real_models.agreeing([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6]]) == 4 / 6


def test_greedy_answers_of_transformers_go_on_after_an_eos_token_and_may_have_one() -> None:
    """Answers go on after EOS, as here with ignore_eos. `generate` with min_new_tokens never draws EOS."""
    model, asked = tiny_model("llama"), [[5, 6, 7]]
    answers = real_models.theirs(model, [1, 2, 3], asked)["answers"]
    model.generation_config.eos_token_id = model.config.eos_token_id = answers[0][3]
    assert real_models.theirs(model, [1, 2, 3], asked)["answers"] == answers
    assert follows(model, asked[0], answers[0])
