"""From tokens to deltas: nothing lost, nothing twice, no token before its text and none behind the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import Detokenizer, FinishReason, SamplingParams, Tokenizer, TokenLogprobs
from phase6_integration.answers import Answer, Ask, Delta

TOKENIZER = Tokenizer.from_pretrained()
EOS = next(iter(TOKENIZER.eos_ids))
TEXTS = st.text("abc \u00e9\U0001f600\n", max_size=30)
WORDS = st.lists(st.sampled_from([*range(3, 260), 300, 700, 1200]), max_size=30)  # single bytes, and some words


def answered(
    tokens: list[int], last: FinishReason = FinishReason.LENGTH, **params: object
) -> tuple[Answer, list[Delta]]:
    """All deltas of an answer whose tokens the engine says one by one. Log-probabilities are minus its number."""
    asked = SamplingParams(**{"max_tokens": 1000, "logprobs": 0, **params})  # type: ignore[arg-type]
    answer = Answer(4, Ask("a", (1,), asked), 0.0, TOKENIZER)
    deltas = []
    for number, token in enumerate(tokens):
        reason = last if number + 1 == len(tokens) else None
        delta = answer.take(token, TokenLogprobs(-float(number), ()), reason, float(number))
        if delta is not None:
            deltas.append(delta)
        if answer.done:
            break
    return answer, deltas


@given(st.one_of(WORDS, TEXTS.map(TOKENIZER.encode)).filter(len), st.lists(TEXTS.filter(len), max_size=3))
def test_deltas_joined_are_the_answer(tokens: list[int], stops: list[str]) -> None:
    answer, deltas = answered(tokens, stop=stops)
    whole = Detokenizer(TOKENIZER, stops)
    text = whole.push(tokens) + whole.flush()
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert all(delta.text for delta in deltas[:-1]), "no delta is empty but the last"
    shown = [token for delta in deltas for token in delta.tokens]
    assert shown == tokens[: len(shown)]
    assert [-found.logprob for delta in deltas for found in delta.logprobs] == list(range(len(shown)))
    if whole.stopped is None:
        assert shown == tokens
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    else:
        assert answer.state.stop_reason == whole.stopped
        assert deltas[-1].finish_reason is FinishReason.STOP
    begins = [offset for delta in deltas for offset in delta.offsets]
    for number, offset in enumerate(begins):
        before = Detokenizer(TOKENIZER)
        assert offset == len(before.push(tokens[:number])), "a token begins where the text before it ends"
        assert whole.stopped is None or offset < len(text)


@given(WORDS)
def test_a_token_is_out_once_its_text_is(tokens: list[int]) -> None:
    _, deltas = answered(tokens)
    shown = 0
    for delta in deltas[:-1]:
        shown += len(delta.text)
        assert all(offset < shown for offset in delta.offsets)


def test_what_ends_an_answer_is_no_part_of_it() -> None:
    answer, deltas = answered([300, 700, EOS], FinishReason.STOP)
    assert [token for delta in deltas for token in delta.tokens] == [300, 700]
    assert (answer.state.generated, answer.state.stop_reason) == (3, None)
    answer, deltas = answered([300, 700], FinishReason.STOP, stop_token_ids=[700])
    assert [token for delta in deltas for token in delta.tokens] == [300]
    assert answer.state.stop_reason == 700


def test_a_stop_string_within_min_tokens_is_text_like_any_other() -> None:
    tokens = TOKENIZER.encode("one two one two")
    least = len(TOKENIZER.encode("one two"))
    answer, deltas = answered(tokens, stop="two", min_tokens=least)
    assert "".join(delta.text for delta in deltas) == "one two one "
    assert answer.state.stop_reason == "two"


def test_a_character_in_pieces_comes_whole_with_all_its_tokens() -> None:
    smile = list(range(3, 259))
    pieces = [
        token for byte in "\U0001f600".encode() for token in smile if TOKENIZER.token_bytes(token) == bytes([byte])
    ]
    assert len(pieces) == 4
    _, deltas = answered([300, *pieces, 700])
    (found,) = [delta for delta in deltas if "\U0001f600" in delta.text]
    assert list(found.tokens) == pieces
    assert len(set(found.offsets)) == 1


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT])
def test_an_answer_that_is_cut_gives_what_it_held_back(reason: FinishReason) -> None:
    answer = Answer(0, Ask("a", (1,), SamplingParams(stop="quite a long stop")), 0.0, TOKENIZER)
    tokens = TOKENIZER.encode("it is quite a")
    deltas = [answer.take(token, None, None, 0.0) for token in tokens]
    shown = "".join(delta.text for delta in deltas if delta is not None)
    assert shown == "it is "
    last = answer.end(reason, "why")
    assert (last.text, last.finish_reason, last.error) == ("quite a", reason, "why")
    assert answer.reason is reason


def test_without_a_tokenizer_an_answer_is_its_tokens() -> None:
    answer = Answer(0, Ask("a", (1,), SamplingParams()), 0.0, None)
    first, second = answer.take(5, None, None, 0.0), answer.take(6, None, FinishReason.LENGTH, 1.0)
    assert first is not None
    assert second is not None
    assert (first.tokens, first.text, second.tokens, second.finish_reason) == ((5,), "", (6,), FinishReason.LENGTH)
