"""The bundled corpus and the tokenizer trained on it: well formed, repeatable, and exact."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from phase0_request.lab.corpus import generate, train_tokenizer
from phase0_request.lab.corpus.facts import CorpusError, Fact
from phase0_request.lab.corpus.generate import Corpus, load

BUNDLED = train_tokenizer.FOLDER
ANSWER = "A page is a block of memory that holds a few tokens."
TOPIC = f'[[topic]]\nname = "page"\narticle = "a"\nwhat = "{ANSWER}"\n'
PAIR = f'[[pair]]\nask = ["One?", "Two?", "Three?"]\nanswer = "{ANSWER}"\n'


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def written(folder: Path, text: str, name: str = "facts.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


# The facts


def test_the_corpus_is_large_enough_to_train_on(corpus: Corpus) -> None:
    by_source = Counter(fact.source for fact in corpus.facts)
    assert by_source["general"] >= 100
    assert by_source["smalltalk"] >= 60
    assert by_source["serving"] >= 280
    assert len({fact.answer for fact in corpus.facts}) >= 600
    assert len({question for question, _ in corpus.pairs()}) >= 10_000


def test_no_question_stands_twice(corpus: Corpus) -> None:
    counts = Counter(question.casefold() for question, _ in corpus.pairs())
    assert [question for question, count in counts.items() if count > 1] == []


def test_no_follow_up_is_a_question_of_the_corpus(corpus: Corpus) -> None:
    follow_ups = {follow_up.casefold() for group in generate.FOLLOW_UPS.values() for follow_up in group}
    assert follow_ups & {question.casefold() for question, _ in corpus.pairs()} == set()


def test_no_answer_holds_markdown(corpus: Corpus) -> None:
    marks = ("`", "**", "__", "](", "# ")
    assert [fact.where for fact in corpus.facts if any(mark in fact.answer for mark in marks)] == []


def test_a_few_answers_and_no_more_hold_other_scripts(corpus: Corpus) -> None:
    assert 3 <= sum(not fact.answer.isascii() for fact in corpus.facts) <= 20


def test_the_model_knows_its_name(corpus: Corpus) -> None:
    answer = "I am tiny chat, a very small language model trained for nano-serving, a tutorial on LLM serving."
    assert dict(corpus.pairs())["Who are you?"] == answer


def test_a_topic_is_asked_for_in_many_ways(tmp_path: Path) -> None:
    facts = load(written(tmp_path, TOPIC + f'why = "{ANSWER}"\n')).facts
    assert [(fact.kind, fact.topic) for fact in facts] == [("what", "page"), ("why", "page")]
    assert {"What is a page?", "what is a page", "what is page", "page", "Tell me about a page."} <= set(
        facts[0].questions
    )
    assert "Why does a page matter?" in facts[1].questions


def test_a_name_without_article_is_asked_for_once(tmp_path: Path) -> None:
    facts = load(written(tmp_path, TOPIC.replace('"a"', '""'))).facts
    assert "What is page?" in facts[0].questions
    assert len({question.casefold() for question in facts[0].questions}) == len(facts[0].questions)


# What is refused


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[pair]\n", r"facts\.toml: not a TOML file"),
        ("[[fact]]\nx = 1\n", r"facts\.toml: 'fact' is not allowed here.*\[\[topic\]\] and \[\[pair\]\]"),
        ("pair = [1]\n", r"facts\.toml: pair 1 must be a table, got 1"),
        (PAIR + PAIR.replace("ask", "asks"), r"facts\.toml: pair 2: ask must be a list of questions, got None"),
        (PAIR.replace(', "Two?", "Three?"', ""), r"pair 1 \('One\?'\): ask must hold 3 to 5 questions, got 1"),
        (PAIR.replace("Two", "one"), r"pair 1 \('One\?'\): ask lists a question twice"),
        (PAIR + 'kind = "hello"\n', r"pair 1 \('One\?'\): kind must be one of 'pair', 'greeting'.*got 'hello'"),
        (PAIR + "note = 1\n", r"pair 1 \('One\?'\): unknown key 'note'; allowed are ask, answer, kind"),
        (PAIR.replace(ANSWER, "A page."), r"pair 1 \('One\?'\): answer must have 8 to 45 words, got 2"),
        (PAIR.replace(ANSWER, "word " * 45 + "end"), r"pair 1 \('One\?'\): answer must have 8 to 45 words, got 46"),
        (PAIR.replace(ANSWER, ANSWER + "  "), r"pair 1 \('One\?'\): answer must be one line of text"),
        (TOPIC.replace('"a"', '"teh"'), r"topic 1 \('page'\): article must be one of 'a', 'an', 'the', '', got 'teh'"),
        (TOPIC.replace("what", "why"), r"topic 1 \('page'\): what must be one line of text.*got None"),
        (TOPIC.replace('"page"', "7"), r"topic 1 \(7\): name must be one line of text.*got 7"),
        (TOPIC + TOPIC, r"topic 2 \('page'\): the question 'What is a page\?' is also that of facts\.toml: topic 1"),
    ],
)
def test_a_fault_is_refused_by_file_and_entry(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CorpusError, match=says):
        load(written(tmp_path, text))


def test_a_question_of_another_file_is_refused_however_it_is_punctuated(tmp_path: Path) -> None:
    written(tmp_path, TOPIC, "a.toml")
    written(tmp_path, PAIR.replace("Two?", "what is... a PAGE!"), "b.toml")
    with pytest.raises(CorpusError, match=r"b\.toml: pair 1 .* is also that of a\.toml: topic 1 \('page'\)"):
        load(tmp_path)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no \*\.toml file in"):
        load(tmp_path)


# Chats and documents


def test_chats_are_decided_by_the_seed(corpus: Corpus) -> None:
    first = list(corpus.conversations(7, 300))
    assert list(load().conversations(7, 300)) == first
    assert list(corpus.conversations(7, 100)) == first[:100]
    assert list(corpus.conversations(8, 300)) != first


def test_as_many_chats_as_facts_hold_every_fact(corpus: Corpus) -> None:
    answers = [message["content"] for chat in corpus.conversations(0, len(corpus.facts)) for message in chat]
    assert {fact.answer for fact in corpus.facts} <= set(answers)


def test_a_chat_is_an_optional_system_message_and_one_to_four_turns(corpus: Corpus) -> None:
    turns, systems = Counter[int](), 0
    for chat in corpus.conversations(1, 4000):
        roles = [message["role"] for message in chat]
        systems += roles[0] == "system"
        roles = roles[roles[0] == "system" :]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        turns[len(roles) // 2] += 1
    assert set(turns) == {1, 2, 3, 4}
    assert 0.5 < turns[1] / 4000 < 0.7
    assert 0.1 < systems / 4000 < 0.2


def test_every_turn_is_answered_by_the_corpus_and_a_follow_up_by_the_topic_before(corpus: Corpus) -> None:
    answer_to = dict(corpus.pairs())
    by_answer = {fact.answer: fact for fact in corpus.facts}
    kind_of = {follow_up: kind for kind, group in generate.FOLLOW_UPS.items() for follow_up in group}
    followed = Counter[str]()
    for chat in corpus.conversations(2, 4000):
        dialogue = [message["content"] for message in chat if message["role"] != "system"]
        before: Fact | None = None
        for question, answer in zip(dialogue[::2], dialogue[1::2], strict=True):
            fact = by_answer[answer]
            if question in kind_of:
                assert before is not None
                assert (fact.topic, fact.kind) == (before.topic, kind_of[question])
                assert fact is not before
                followed[fact.kind] += 1
            else:
                assert answer_to[question] == answer
            before = fact
    assert set(followed) == {"what", "why", "how"}


def test_documents_state_every_fact_once_in_an_order_set_by_the_seed(corpus: Corpus) -> None:
    documents = list(corpus.documents(3))
    text = "".join(documents)
    for fact in corpus.facts:
        if fact.source != generate.SMALL_TALK:
            assert text.count(fact.answer) == 1, fact.where
    assert all(
        title and body.endswith(".\n") for title, _, body in (document.partition("\n\n") for document in documents)
    )
    assert list(corpus.documents(3)) == documents
    assert list(corpus.documents(4)) != documents


def test_one_fact_alone_makes_chats_and_a_document(tmp_path: Path) -> None:
    alone = load(written(tmp_path, PAIR))
    assert all(chat[-1]["content"] == ANSWER for chat in alone.conversations(0, 50))
    assert list(alone.documents(0)) == [f"Facts notes\n\n{ANSWER}\n"]


def test_the_command_prints_counts_and_chats(capsys: pytest.CaptureFixture[str], corpus: Corpus) -> None:
    generate.main(["--seed", "5"])
    out = capsys.readouterr().out
    assert f"{sum(1 for _ in corpus.pairs()):,}" in out
    assert next(corpus.conversations(5, 1))[-1]["content"][:30] in out


# The tokenizer


def test_training_again_writes_the_bundled_files_and_texts_take_few_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer.main(["--output", str(tmp_path / "new")])
    written = list((tmp_path / "new").iterdir())
    for file in written:
        assert file.read_bytes() == (BUNDLED / file.name).read_bytes(), f"{file.name}: train the tokenizer again"
    assert {file.name for file in written} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    printed = capsys.readouterr().out
    assert "4,096 tokens" in printed
    each = re.findall(r"(questions|answers|documents)\W+([\d.]+) characters a token", printed)
    assert [name for name, _ in each] == ["questions", "answers", "documents"]
    assert min(float(figure) for _, figure in each) > 3.5


def test_characters_per_token_is_the_mean_over_all_texts(tokenizer: Tokenizer) -> None:
    assert train_tokenizer.characters_per_token(tokenizer, ["1024", "What is"]) == 11 / 6


def test_too_small_a_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the texts yield \d+ tokens; 4096 need a larger corpus"):
        train_tokenizer.train(["a b c", "a b c"])


def test_the_vocabulary_is_4096_tokens_with_three_special_ones_first(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(4096))
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert {name: vocabulary[name] for name in special} == special
    added = tokenizer.get_added_tokens_decoder()
    assert {token: content.content for token, content in added.items()} == {i: name for name, i in special.items()}
    assert all(token.special for token in added.values())


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    assert sum(len(piece) == 1 for piece in pieces) == 256


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text())
@example("naïve café, 你好, привет, 🙂 and 👩‍👩‍👧")
@example("e\u0301 is not composed to \xe9")
@example("\x00\x01\x7f\u200b\ufeff\ufffd\U0010ffff")
@example(" leading,  two  blanks,\ttabs \r\n\r\n and trailing  \n")
@example("don't CAN'T 'tis 'sound' 1024 3.14 x2")
@example("<|im_start|>user\nhi<|im_end|>\n")
def test_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert all(0 <= token < 4096 for token in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_whole_corpus_comes_back_exactly(tokenizer: Tokenizer, corpus: Corpus) -> None:
    texts = [*dict.fromkeys(text for pair in corpus.pairs() for text in pair), *corpus.documents(0)]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert tokenizer.decode_batch(encoded) == texts


def test_words_keep_their_space_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("What is a KV cache?").tokens == ["What", "Ġis", "Ġa", "ĠKV", "Ġcache", "?"]
    assert tokenizer.encode("1024").tokens == ["1", "0", "2", "4"]
    assert len(tokenizer.encode("user\n").ids) == 2


def test_transformers_loads_the_directory_and_renders_a_chat(corpus: Corpus, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    loaded = AutoTokenizer.from_pretrained(BUNDLED)
    assert (len(loaded), loaded.model_max_length) == (4096, 2048)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (2, 0, None)
    assert sorted(loaded.all_special_ids) == [0, 1, 2]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hi there!"},
        {"role": "user", "content": " What is a KV cache?\n"},
    ]
    chat = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHi there!<|im_end|>\n<|im_start|>user\n What is a KV cache?\n<|im_end|>\n"
    )
    assert loaded.apply_chat_template(messages, tokenize=False) == chat
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == chat + "<|im_start|>assistant\n"
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(prompt).ids
    for fact in corpus.facts[::10]:
        assert loaded.decode(loaded.encode(fact.answer)) == fact.answer
    generation = GenerationConfig.from_pretrained(BUNDLED)
    assert (generation.eos_token_id, generation.pad_token_id) == ([2, 0], 0)
