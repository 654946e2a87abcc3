"""The examination of the bundled model: its questions are not in the corpus, and its rule refuses wrong answers."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from phase0_request.lab.corpus.facts import CorpusError, Fact, words
from phase0_request.lab.corpus.generate import load
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.lab.training import judge as judging
from phase2_prefill_decode.lab.training.judge import Question, answers_by, examine, held_out, judge, key, main, trained
from phase2_prefill_decode.lab.training.rewording import Rewording

FACTS = load().facts
QUESTIONS = held_out(FACTS)


def fact(name: str) -> Fact:
    (found,) = (fact for fact in FACTS if key(fact) == name)
    return found


PAGE_WHAT, PAGE_WHY = fact("page: what"), fact("page: why")
FRANCE, GERMANY = fact("What is the capital of France?"), fact("What is the capital of Germany?")
SKY = fact("Why is the sky blue?")


# The questions


def test_every_key_names_one_fact() -> None:
    assert [name for name, count in Counter(map(key, FACTS)).items() if count > 1] == []


def test_both_sets_have_the_same_composition() -> None:
    for name in ("development", "held_out"):
        of_set = [question for question in QUESTIONS if question.set == name]
        assert Counter(question.fact.source for question in of_set) == {"serving": 60, "general": 25, "smalltalk": 15}
    kinds = Counter((question.set, question.fact.kind) for question in QUESTIONS if question.fact.source == "serving")
    assert all(kinds["development", kind] == kinds["held_out", kind] >= 9 for kind in ("what", "why", "how", "pair"))


def test_no_fact_is_asked_twice() -> None:
    assert len({key(question.fact) for question in QUESTIONS}) == len(QUESTIONS) == 200


def test_no_paraphrase_is_a_question_of_the_corpus() -> None:
    listed = {tuple(words(ask)) for fact in FACTS for ask in fact.questions}
    assert len(listed) > 8_000
    assert [question.ask for question in QUESTIONS if tuple(words(question.ask)) in listed] == []


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('set = "development"\nask = "Pages?"\nfact = "page: when"', "'page: when'"),
        ('set = "exam"\nask = "Pages?"\nfact = "page: what"', "'exam'"),
        ('set = "development"\nask = "Pages?"', "needs set, ask and fact"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, entry: str, complaint: str) -> None:
    file = tmp_path / "some.toml"
    file.write_text(f"[[question]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=complaint) as caught:
        held_out(FACTS, file)
    assert str(caught.value).startswith("some.toml: question 1 ('Pages?')")


def test_trained_questions_are_those_of_the_corpus() -> None:
    asked = trained(FACTS, sampled=None)
    assert [(question.ask, question.fact.answer) for question in asked] == list(load().pairs())
    sample = trained(FACTS, sampled=50, seed=1)
    assert len(sample) == 50
    assert set(sample) <= set(asked)
    assert sample == trained(FACTS, sampled=50, seed=1) != trained(FACTS, sampled=50, seed=2)


# The rule


@pytest.mark.proof
def test_the_exact_answer_of_every_fact_is_right() -> None:
    for each in FACTS:
        verdict = judge(each.answer, True, each, FACTS)
        assert verdict == judging.Verdict(True, "right", 1.0, each)


def test_punctuation_and_a_small_slip_are_forgiven() -> None:
    assert judge(PAGE_WHAT.answer.rstrip("."), True, PAGE_WHAT, FACTS).right
    slip = judge(PAGE_WHAT.answer.replace("holds the keys", "holds keys"), True, PAGE_WHAT, FACTS)
    length = len(words(PAGE_WHAT.answer))
    assert slip.right
    assert slip.similarity == pytest.approx(2 * (length - 1) / (2 * length - 1))


def test_an_answer_that_did_not_end_is_refused() -> None:
    assert judge(PAGE_WHAT.answer, False, PAGE_WHAT, FACTS).why == "did not end"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" ".join(PAGE_WHAT.answer.split()[:15]), "no fact"),
        (f"{PAGE_WHAT.answer} {PAGE_WHAT.answer}", "no fact"),
        (f"{PAGE_WHAT.answer} It is good to see you.", "no fact"),
        (f"{PAGE_WHAT.answer} {FRANCE.answer}", "no fact"),
        (" ".join(sorted(PAGE_WHAT.answer.split())), "no fact"),
        ("", "no fact"),
        (PAGE_WHY.answer, "another kind"),
        (FRANCE.answer, "another fact"),
        (PAGE_WHAT.answer.replace("16", "32"), "a name or number"),
    ],
)
def test_other_answers_are_refused(text: str, why: str) -> None:
    verdict = judge(text, True, PAGE_WHAT, FACTS)
    assert (verdict.right, verdict.why) == (False, why)


def test_one_wrong_name_is_a_wrong_answer() -> None:
    text = FRANCE.answer.replace("Paris", "Berlin")
    verdict = judge(text, True, FRANCE, FACTS)
    assert verdict.similarity > judging.ALIKE
    assert (verdict.why, verdict.nearest) == ("a name or number", FRANCE)
    assert judge(GERMANY.answer, True, FRANCE, FACTS).nearest == GERMANY


def test_the_closer_of_two_facts_decides() -> None:
    ours = Fact("", "x", "pair", ("a?",), "one two three four five six seven eight nine ten eleven twelve")
    near = Fact("", "x", "pair", ("b?",), "one two three four five six seven eight nine ten eleven thirteen")
    assert judge(near.answer, True, ours, [ours]).right  # similar enough, were there no other
    assert judge(near.answer, True, ours, [ours, near]).why == "another fact"
    assert judge(near.answer, True, near, [ours, near]).right


def test_the_nearest_fact_is_the_one_a_plain_search_finds() -> None:
    texts = [PAGE_WHAT.answer[:60], GERMANY.answer.replace("Spree", "Nile"), "A page is a colour of the sea", "none"]
    for text in texts:
        plain = max((PAGE_WHY, *FACTS), key=lambda other: judging._similarity(text, other))
        assert judge(text, True, PAGE_WHY, FACTS).nearest == plain


# The report


def test_a_report_counts_right_and_wrong_by_reason() -> None:
    given = {
        "right": (PAGE_WHAT.answer, True),
        "nearly": (PAGE_WHAT.answer.replace("holds the keys", "holds keys"), True),
        "cut": (PAGE_WHAT.answer, False),
        "long": (PAGE_WHAT.answer, False),
        "why": (PAGE_WHY.answer, True),
    }
    batches: list[list[str]] = []

    def answer(asks: list[str]) -> list[tuple[str, bool]]:
        batches.append(asks)
        return [given[ask] for ask in asks]

    report = examine(answer, [Question(ask, PAGE_WHAT, "development") for ask in given], FACTS)
    assert batches == [list(given)]
    assert (report.right, report.share, report.word_for_word) == (2, 0.4, 1)
    assert report.reasons == {"did not end": 2, "another kind": 1}
    assert [failure.question.ask for failure in report.failures] == ["cut", "long", "why"]
    assert examine(lambda asks: [], [], FACTS).share == 0


def test_an_answer_for_each_question_is_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        examine(lambda asks: [("", True)], [Question("a?", PAGE_WHAT, "trained")] * 2, FACTS)


# Asking a model


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: a very small model that has memorised three answers."""
    directory = tmp_path_factory.mktemp("parrot")
    for file in BUNDLED.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, directory)
    tokenizer = Tokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lessons = [_lesson(tokenizer, each) for each in (PAGE_WHAT, FRANCE, SKY)]
    for _ in range(100):
        for tokens in lessons:
            model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def _lesson(tokenizer: Tokenizer, known: Fact) -> torch.Tensor:
    asked = {"role": "user", "content": known.questions[0]}
    answered = {"role": "assistant", "content": known.answer}
    return torch.tensor([tokenizer.chat([asked, answered], add_generation_prompt=False)])


def test_answers_come_back_in_order_and_without_their_end(parrot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "BATCH", 2)
    told: list[int] = []
    asked = [PAGE_WHAT, FRANCE, SKY, FRANCE, PAGE_WHAT]
    answers = answers_by(parrot, told.append)([each.questions[0] for each in asked])
    assert answers == [(each.answer, True) for each in asked]
    assert told == [1] * 5


def test_an_answer_stops_at_the_limit(parrot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "LONGEST_ANSWER", 3)
    ((text, ended),) = answers_by(parrot)([PAGE_WHAT.questions[0]])
    assert PAGE_WHAT.answer.startswith(text)
    assert not ended


def test_the_command_examines_a_directory(
    parrot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "some.toml"
    asks = [(PAGE_WHAT.questions[0], PAGE_WHAT), (FRANCE.questions[0], FRANCE), (SKY.questions[0], FRANCE)]
    entries = (f"[[question]]\nset = 'held_out'\nask = '{ask}'\nfact = '{key(fact)}'\n" for ask, fact in asks)
    listed.write_text("".join(entries), encoding="utf-8")
    monkeypatch.setattr(judging, "held_out", lambda facts: held_out(facts, listed))
    out = tmp_path / "scores.json"
    main(["--directory", str(parrot), "--sets", "held_out", "--show-failures", "--json", str(out)])
    written = json.loads(out.read_text())
    failures = {"another fact": 1}
    assert written["figures"] == {
        "held_out": {"asked": 3, "right": 2, "share": 0.6667, "word_for_word": 2, "failures": failures}
    }
    assert str(tmp_path) not in out.read_text()
    shown = " ".join(capsys.readouterr().out.split())  # the console wraps long lines
    assert "1 another fact" in shown
    assert f"wanted {FRANCE.answer}" in shown
    assert f"given {SKY.answer}" in shown


def test_no_paraphrase_of_the_examination_is_among_the_wordings_for_training() -> None:
    asked = {" ".join(words(question.ask)) for question in held_out(load().facts)}
    known = Rewording.load().wordings
    assert len(known) > 1000
    assert asked.isdisjoint(" ".join(words(wording)) for wordings in known.values() for wording in wordings)


def test_every_wording_is_of_a_fact_of_the_corpus() -> None:
    assert set(Rewording.load().wordings) <= {key(fact) for fact in load().facts}
