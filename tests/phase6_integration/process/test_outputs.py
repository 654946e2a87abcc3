"""From tokens to chunks: nothing lost, nothing twice, no token before its text and none behind the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import Detokenizer, FinishReason, SamplingParams, Tokenizer
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Chunk, Output

TOKENIZER = Tokenizer.from_pretrained()
EOS = next(iter(TOKENIZER.eos_ids))
TEXTS = st.text("abc \u00e9\U0001f600\n", max_size=30)
WORDS = st.lists(st.sampled_from([*range(3, 260), 300, 700, 1200]), max_size=30)  # single bytes, and some words


def output(tokenizer: Tokenizer | None, params: SamplingParams) -> Output:
    return Output(EngineRequest("a", [(1,)], params, [params.max_tokens]), 0, tokenizer)


def answered(
    tokens: list[int], last: FinishReason = FinishReason.LENGTH, **params: object
) -> tuple[Output, list[Chunk]]:
    """All chunks of an answer that the engine sends token by token."""
    asked = SamplingParams(**{"max_tokens": 1000, **params})  # type: ignore[arg-type]
    answer = output(TOKENIZER, asked)
    chunks = []
    for number, token in enumerate(tokens):
        reason = last if number + 1 == len(tokens) else None
        chunk = answer.append(token, reason, float(number))
        if chunk is not None:
            chunks.append(chunk)
        if answer.done:
            break
    return answer, chunks


@given(st.one_of(WORDS, TEXTS.map(TOKENIZER.encode)).filter(len), st.lists(TEXTS.filter(len), max_size=3))
def test_chunks_joined_are_the_output(tokens: list[int], stops: list[str]) -> None:
    answer, chunks = answered(tokens, stop=stops)
    whole = Detokenizer(TOKENIZER, SamplingParams(stop=stops))
    text = whole.push(tokens) + whole.flush()
    got = "".join(chunk.text for chunk in chunks)
    assert got == text, f"tokens {tokens} are the text {text!r}; the chunks have {got!r}"
    ended = [chunk.finish_reason is not None for chunk in chunks]
    assert ended == [False] * (len(chunks) - 1) + [True], "the last chunk, and only it, has a finish reason"
    assert all(chunk.text for chunk in chunks[:-1]), "no chunk is empty but the last"
    shown = [token for chunk in chunks for token in chunk.tokens]
    assert shown == tokens[: len(shown)], f"tokens {tokens} came out as {shown}"
    if whole.stopped is None:
        assert shown == tokens, f"{len(tokens) - len(shown)} of {len(tokens)} tokens never came out"
        assert chunks[-1].finish_reason is FinishReason.LENGTH
    else:
        assert answer.stop_reason == whole.stopped
        assert chunks[-1].finish_reason is FinishReason.STOP
    begins = [offset for chunk in chunks for offset in chunk.offsets]
    for number, offset in enumerate(begins):
        before = Detokenizer(TOKENIZER)
        begins_at = len(before.push(tokens[:number]))
        assert offset == begins_at, f"token {number} begins after {begins_at} characters; its offset is {offset}"
        assert whole.stopped is None or offset < len(text), (
            f"token {number} begins in the stop string: it must not come out"
        )


@given(WORDS)
def test_a_token_is_out_once_its_text_is(tokens: list[int]) -> None:
    _, chunks = answered(tokens)
    shown = 0
    for chunk in chunks[:-1]:
        shown += len(chunk.text)
        early = [offset for offset in chunk.offsets if offset >= shown]
        assert not early, f"{shown} characters are sent; tokens that begin at {early} came out before their text"


def test_the_token_that_ends_the_output_is_not_part_of_it() -> None:
    answer, chunks = answered([300, 700, EOS], FinishReason.STOP)
    assert [token for chunk in chunks for token in chunk.tokens] == [300, 700]
    assert (answer.generated, answer.stop_reason) == (3, None)
    answer, chunks = answered([300, 700], FinishReason.STOP, stop_token_ids=[700])
    assert [token for chunk in chunks for token in chunk.tokens] == [300]
    assert ("".join(chunk.text for chunk in chunks), answer.stop_reason) == (TOKENIZER.decode([300]), 700)


def test_a_stop_token_that_is_included_is_part_of_the_output() -> None:
    answer, chunks = answered([300, 700], FinishReason.STOP, stop_token_ids=[700], include_stop_str_in_output=True)
    assert [token for chunk in chunks for token in chunk.tokens] == [300, 700]
    assert "".join(chunk.text for chunk in chunks) == Detokenizer(TOKENIZER).push([300, 700])
    assert (list(chunks[-1].ended_by), answer.stop_reason) == ([], 700)


def test_a_character_in_pieces_comes_whole_with_all_its_tokens() -> None:
    smile = list(range(3, 259))
    pieces = [
        token for byte in "\U0001f600".encode() for token in smile if TOKENIZER.token_bytes(token) == bytes([byte])
    ]
    assert len(pieces) == 4
    _, chunks = answered([300, *pieces, 700])
    (found,) = [chunk for chunk in chunks if "\U0001f600" in chunk.text]
    assert list(found.tokens) == pieces, f"the four tokens {pieces} come with the emoji; with it came {[*found.tokens]}"
    assert len(set(found.offsets)) == 1, f"all four begin at the emoji; their offsets are {[*found.offsets]}"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT])
def test_finishing_early_sends_the_text_held_back(reason: FinishReason) -> None:
    answer = output(TOKENIZER, SamplingParams(stop="quite a long stop"))
    tokens = TOKENIZER.encode("it is quite a")
    chunks = [answer.append(token, None, 0.0) for token in tokens]
    shown = "".join(chunk.text for chunk in chunks if chunk is not None)
    assert shown == "it is "
    last = answer.finish(reason, "why")
    assert (last.text, last.finish_reason, last.error) == ("quite a", reason, "why")
    assert answer.reason is reason


def test_without_a_tokenizer_an_answer_is_its_tokens() -> None:
    answer = output(None, SamplingParams())
    first, second = answer.append(5, None, 0.0), answer.append(6, FinishReason.LENGTH, 1.0)
    assert first is not None
    assert second is not None
    assert ([*first.tokens], [*first.offsets], first.text, [*second.tokens]) == ([5], [0], "", [6])
    assert second.finish_reason is FinishReason.LENGTH
