"""What the bundled model is made of: corpus, tokenizer, lessons, training, and the rule that judges its answers."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from chapters.tiny_chat import tokenizer as tokenizing
from chapters.tiny_chat.corpus import CorpusError, read, words
from chapters.tiny_chat.judge import Verdict, held_out, judge
from chapters.tiny_chat.lessons import IGNORED, Lesson, Lessons, batches
from chapters.tiny_chat.train import loss_of, train
from chapters.tiny_chat.wordings import Wordings, key
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights

FACTS = read()
TOKENIZER = Tokenizer.from_pretrained()
QUESTIONS = held_out(FACTS)
FACT = {key(fact): fact for fact in FACTS}
PAGE, FRANCE = FACT["page: what"], FACT["What is the capital of France?"]
ANSWER = "A page is a block of memory that holds a few tokens."
TOPIC = f'[[topic]]\nname = "page"\narticle = "a"\nwhat = "{ANSWER}"\n'
PAIR = f'[[pair]]\nask = ["One?", "Two?", "Three?"]\nanswer = "{ANSWER}"\n'


# The corpus


def test_the_corpus_is_large_enough_and_asks_no_question_twice() -> None:
    assert Counter(fact.source for fact in FACTS) == {"general": 289, "serving": 714, "smalltalk": 100}
    asked = Counter(question.casefold() for fact in FACTS for question in fact.questions)
    assert len(asked) > 10_000
    assert max(asked.values()) == 1
    assert {"What is a page?", "what is a page", "what is page", "page"} <= set(PAGE.questions)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PAIR.replace("Two", "one"), r"pair 1 \('One\?'\): ask lists a question twice"),
        (PAIR + "note = 1\n", r"pair 1 \('One\?'\): it has 3 to 5 questions to ask, an answer"),
        (PAIR + 'kind = "hello"\n', r"pair 1 \('One\?'\): it has .* a kind of pair, greeting"),
        (PAIR.replace(ANSWER, "A page."), r"pair 1 \('One\?'\): an answer is a line of 8 to 45 words, got 'A page.'"),
        (TOPIC.replace('"a"', '"teh"'), r"topic 1 \('page'\): it has a name, an article of 'a', 'an', 'the', ''"),
        (TOPIC + PAIR.replace("Two?", "what is... a PAGE!"), r"pair 1 .* is also that of a\.toml: topic 1"),
    ],
)
def test_a_fault_is_refused_by_file_and_entry(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=says):
        read(tmp_path)


# The tokenizer


def test_training_the_tokenizer_writes_the_bundled_bytes(tmp_path: Path) -> None:
    tokenizing.write(tokenizing.train(tokenizing.training_texts(FACTS)), tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (BUNDLED / file.name).read_bytes(), file.name


# Lessons and training


def said(lesson: Lesson) -> list[str]:
    """The runs of tokens that are learned, as text: in a chat, one a turn."""
    runs: list[list[int]] = [[]]
    for token, learned in zip(lesson.tokens, lesson.learned, strict=True):
        if learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [TOKENIZER.decode(run) for run in runs if run]


def test_only_answers_and_their_ends_are_learned_and_every_fact_comes_before_any_comes_twice() -> None:
    first = list(islice(Lessons(FACTS, TOKENIZER, 3), 1500))
    answers = {fact.answer for fact in FACTS}
    chats = [lesson for lesson in first[:300] if lesson.tokens[0] == 1]
    assert len(chats) > 200
    for lesson in chats:
        assert set(said(lesson)) <= answers
        ends = [token for token, learned in zip(lesson.tokens, lesson.learned, strict=True) if learned]
        assert ends.count(2) == len(said(lesson))  # <|im_end|>
    assert {answer for lesson in first for answer in said(lesson)} & answers == answers
    assert list(islice(Lessons(FACTS, TOKENIZER, 3), 50)) == first[:50]


def test_a_batch_is_its_lessons_shifted_by_one_and_padding_is_not_learned() -> None:
    inputs, targets = next(batches(Lessons(FACTS, TOKENIZER, 3), 2048, 1024))
    learned = targets != IGNORED
    assert inputs.numel() <= 2048
    assert learned.any(1).all()
    assert torch.equal(targets[:, :-1][learned[:, :-1]], inputs[:, 1:][learned[:, :-1]])


def test_no_question_of_the_examination_is_in_what_the_model_is_trained_on() -> None:
    wordings = Wordings()
    asked = {" ".join(words(question.ask)) for question in QUESTIONS}
    known = {" ".join(words(text)) for texts in wordings.by_fact.values() for text in texts}
    listed = {" ".join(words(text)) for fact in FACTS for text in fact.questions}
    assert len(asked) == 200
    assert asked.isdisjoint(known | listed)
    assert set(wordings.by_fact) <= set(FACT)
    rng = random.Random(0)
    assert len({wordings.ask(rng, FACT["KV cache: what"]) for _ in range(500)}) > 250


def test_the_same_seed_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chapters.tiny_chat.train.BATCH_TOKENS", 128)
    monkeypatch.setattr("chapters.tiny_chat.lessons.SORTED_TOGETHER", 16)
    for name in ("a", "b"):
        train(2, 7, tmp_path / name)
    config = ModelConfig.from_pretrained(tmp_path / "a")
    assert config == ModelConfig.from_pretrained(BUNDLED)
    first, second = (load_weights(Checkpoint(tmp_path / name), config) for name in ("a", "b"))
    assert torch.equal(first.embed_tokens, second.embed_tokens)


def test_a_drafter_learns_what_its_teacher_expects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is no distance from itself, and training brings another one nearer."""
    monkeypatch.setattr("chapters.tiny_chat.train.BATCH_TOKENS", 128)
    monkeypatch.setattr("chapters.tiny_chat.lessons.SORTED_TOGETHER", 16)
    teacher = Qwen3ForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16)
    inputs, targets = next(batches(Lessons(FACTS, TOKENIZER, 3), 256, 128))
    assert loss_of(teacher, inputs, targets, teacher).item() == pytest.approx(0, abs=1e-5)
    losses = [train(steps, 7, tmp_path, BUNDLED)["loss"] for steps in (1, 20)]
    assert losses[1] < losses[0]
    assert ModelConfig.from_pretrained(tmp_path).vocab_size == TOKENIZER.vocab_size


# The examination


def test_the_exact_answer_of_every_fact_is_right() -> None:
    for fact in FACTS:
        assert judge(fact.answer, True, fact, FACTS) == Verdict("right", 1.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PAGE.answer.replace("holds the keys", "holds keys"), "right"),  # a small slip
        (" ".join(PAGE.answer.split()[:15]), "no fact"),
        (f"{PAGE.answer} It is good to see you.", "no fact"),
        ("", "no fact"),
        (FACT["page: why"].answer, "another kind"),
        (FRANCE.answer, "another fact"),
        (PAGE.answer.replace("16", "32"), "a name or number"),
    ],
)
def test_an_answer_is_right_or_wrong_for_a_reason(text: str, why: str) -> None:
    assert judge(text, True, PAGE, FACTS).why == why
    assert judge(text, False, PAGE, FACTS).why == "did not end"
