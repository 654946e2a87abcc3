"""The training of the bundled model: its lessons, which tokens count in the loss, and that a run can be repeated."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from phase0_request.lab.corpus.generate import load
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.lab.training.lessons import IGNORED, Lesson, Lessons, batches
from phase2_prefill_decode.lab.training.rewording import Rewording, careless
from phase2_prefill_decode.lab.training.train import rate, shape, train
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights

CORPUS = load()
TOKENIZER = Tokenizer.from_pretrained()
ANSWERS = {fact.answer for fact in CORPUS.facts}


def lessons(count: int, seed: int = 3) -> list[Lesson]:
    return list(islice(Lessons(CORPUS, TOKENIZER, seed), count))


@pytest.fixture(scope="module")
def first() -> list[Lesson]:
    """The first 1500 lessons."""
    return lessons(1500)


def said(lesson: Lesson) -> list[str]:
    """The runs of tokens that are learned, as text: in a chat, one a turn."""
    runs: list[list[int]] = [[]]
    for token, learned in zip(lesson.tokens, lesson.learned, strict=True):
        if learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [TOKENIZER.decode(run) for run in runs if run]


def test_only_answers_and_their_ends_count_in_the_loss(first: list[Lesson]) -> None:
    chats = [lesson for lesson in first[:300] if TOKENIZER.encode("<|im_start|>")[0] == lesson.tokens[0]]
    assert len(chats) > 200
    for lesson in chats:
        assert set(said(lesson)) <= ANSWERS
        ends = [token for token, learned in zip(lesson.tokens, lesson.learned, strict=True) if learned]
        assert ends.count(2) == len(said(lesson))  # <|im_end|>


def test_a_seed_determines_all_lessons(first: list[Lesson]) -> None:
    assert lessons(50) == first[:50]
    assert lessons(50, seed=4) != first[:50]


def test_every_fact_comes_once_before_any_comes_twice(first: list[Lesson]) -> None:
    firsts = [said(lesson) for lesson in first]
    assert {answer for answers in firsts for answer in answers} & ANSWERS == ANSWERS


def test_a_batch_is_its_lessons_shifted_by_one_and_padding_is_not_learned() -> None:
    inputs, targets = next(batches(Lessons(CORPUS, TOKENIZER, 3), 2048, 1024))
    assert inputs.shape == targets.shape
    assert inputs.numel() <= 2048
    learned = targets != IGNORED
    assert learned.any(1).all()
    assert torch.equal(targets[:, :-1][learned[:, :-1]], inputs[:, 1:][learned[:, :-1]])


def test_a_careless_question_keeps_most_of_its_words() -> None:
    rng = random.Random(0)
    question = "Why does the page table of a request matter so much?"
    for _ in range(300):
        words = careless(rng, question).lower().rstrip("?").split()
        assert len(set(words) & set(question.lower().rstrip("?").split())) >= 7


def test_a_fact_has_very_many_wordings() -> None:
    rng, reword = random.Random(0), Rewording.load()
    fact = next(fact for fact in CORPUS.facts if fact.topic == "KV cache")
    assert len({reword.ask(rng, fact) for _ in range(500)}) > 250


def test_the_rate_rises_and_falls_to_a_fiftieth() -> None:
    rates = [rate(step, 1000) for step in range(1000)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert abs(rates[-1] / max(rates) - 0.02) < 1e-4


def test_a_short_run_saves_what_this_phase_loads_and_the_same_seed_makes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of few tokens, and few lessons sorted by length."""
    monkeypatch.setattr("phase2_prefill_decode.lab.training.train.BATCH_TOKENS", 128)
    monkeypatch.setattr("phase2_prefill_decode.lab.training.lessons.SORTED_TOGETHER", 16)
    for name in ("a", "b"):
        took = train(2, 7, tmp_path / name)
        assert took["steps"] == 2
    config = ModelConfig.from_pretrained(tmp_path / "a")
    assert config == ModelConfig.from_pretrained(BUNDLED)
    first, second = (load_weights(tmp_path / name, config) for name in ("a", "b"))
    assert torch.equal(first.embed_tokens, second.embed_tokens)
    assert shape(TOKENIZER).num_hidden_layers == config.num_hidden_layers
