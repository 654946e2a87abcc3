import itertools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from phase0_request import Detokenizer, SamplingParams, Tokenizer
from phase0_request.detokenizer import StopScanner
from phase0_request.tokenizer import BUNDLED
from tests.phase0_request.support import brute_force, cut

TOKENIZER = Tokenizer.from_pretrained()
REFERENCE = HFTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
MULTI_BYTE = "caf\u00e9 \u4f60\u597d \u043f\u0440\u0438 \U0001f469\u200d\U0001f680 \U0001f1ea\U0001f1fa done"

ids = st.integers(0, TOKENIZER.vocab_size - 1)
lone_bytes = st.integers(0, 255).map(lambda b: REFERENCE.token_to_id(BYTE_LETTERS[b]))
BYTE_LETTERS = {TOKENIZER.token_bytes(i)[0]: REFERENCE.id_to_token(i) for i in range(3, 3 + 256)}


def parts_of(tokens: list[int], cuts: list[int], stop: Sequence[str] = (), include_stop: bool = False) -> list[str]:
    """The text of each push, and of the flush."""
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=stop, include_stop_str_in_output=include_stop))
    places = sorted({min(c, len(tokens)) for c in cuts} | {0, len(tokens)})
    texts = [detokenizer.push(tokens[a:b]) for a, b in itertools.pairwise(places)]
    return [*texts, detokenizer.flush()]


@given(st.lists(st.one_of(ids, lone_bytes), max_size=40), st.lists(st.integers(0, 40)))
def test_streamed_text_equals_the_library_decoding_all_tokens_at_once(tokens: list[int], cuts: list[int]) -> None:
    """Any tokens, valid UTF-8 or not, in any pieces. The oracle is the decoder of the tokenizers library."""
    parts, wanted = parts_of(tokens, cuts), REFERENCE.decode(tokens, skip_special_tokens=True)
    given = [TOKENIZER.token_bytes(token) for token in tokens]
    assert "".join(parts) == wanted, f"tokens of the bytes {given}, pushed in {len(parts) - 1} calls, give {parts}"


@pytest.mark.proof
@given(st.text(max_size=30), st.lists(st.integers(0, 100)))
def test_streamed_text_is_never_cut_inside_a_character(text: str, cuts: list[int]) -> None:
    parts = parts_of(TOKENIZER.encode(text), cuts)
    assert "".join(parts) == text
    shown = ""
    for part in parts:
        shown += part
        assert text.startswith(shown)  # no replacement character for an incomplete one


def test_multi_byte_text_split_at_every_position() -> None:
    tokens = [REFERENCE.token_to_id(BYTE_LETTERS[b]) for b in MULTI_BYTE.encode()]  # one byte a token: the worst case
    assert len(tokens) > len(MULTI_BYTE)
    for middle in range(len(tokens) + 1):
        parts = parts_of(tokens, [middle])
        assert "".join(parts) == MULTI_BYTE, f"tokens pushed in two calls, {middle} in the first, give {parts}"
        assert MULTI_BYTE.startswith(parts[0]), f"the first {middle} tokens give {parts[0]!r}: a character was cut"


@given(st.lists(st.one_of(ids, st.integers(0, 2)), max_size=40))
def test_special_tokens_are_written_as_the_library_writes_them(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=False))
    assert detokenizer.push(tokens) + detokenizer.flush() == REFERENCE.decode(tokens, skip_special_tokens=False)


@given(
    st.text("ab \u4f60\U0001f680", max_size=30),
    st.lists(st.text("ab \u4f60\U0001f680", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 60)),
    st.booleans(),
)
def test_stop_strings_spread_over_tokens_end_the_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown = "".join(parts_of(TOKENIZER.encode(text), cuts, stops, include))
    before, stop = brute_force(stops, text)
    wanted = before + (stop or "") * include
    assert shown == wanted, f"the tokens of {text!r} with stop strings {stops} give {shown!r}, not {wanted!r}"


def test_no_part_of_a_stop_string_is_streamed() -> None:
    text = "The answer is 42.\nUser: and why?"
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop="\nUser:"))
    shown = ""
    for character in text:
        shown += detokenizer.push(TOKENIZER.encode(character))
        assert "\n" not in shown, f"{shown!r} was streamed: it has the beginning of the stop string"
    end = shown + detokenizer.flush(), detokenizer.stopped
    assert end == ("The answer is 42.", "\nUser:"), f"{text!r} with the stop string '\\nUser:': text and stop are {end}"


def test_the_text_of_the_first_min_tokens_is_not_searched_for_stop_strings() -> None:
    tokens = [t for word in ("stop", " stop", " go", " stop", " never") for t in TOKENIZER.encode(word)]
    first_two = len(TOKENIZER.encode("stop")) + len(TOKENIZER.encode(" stop"))
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop="stop", min_tokens=first_two))
    shown = detokenizer.push(tokens) + detokenizer.flush()
    assert shown == "stop stop go ", f"the first two words are exempt and the fourth stops, but the text is {shown!r}"


def test_a_token_that_completes_no_character_counts_towards_min_tokens() -> None:
    emoji, stop = "\U0001f680".encode(), REFERENCE.token_to_id(BYTE_LETTERS[ord("s")])
    tokens = [*(REFERENCE.token_to_id(BYTE_LETTERS[byte]) for byte in emoji), stop]
    shown = Detokenizer(TOKENIZER, SamplingParams(stop="s", min_tokens=4)).push(tokens)
    assert shown == "\U0001f680", f"the emoji takes the first 4 tokens and the fifth stops, but the text is {shown!r}"


def test_flush_searches_for_stop_strings_before_min_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop="\ufffd", min_tokens=2))
    shown = detokenizer.push([REFERENCE.token_to_id(BYTE_LETTERS[0xF0])]) + detokenizer.flush()
    assert (shown, detokenizer.stopped) == ("", "\ufffd"), f"no token completes U+FFFD, but flush shows {shown!r}"


def test_flush_returns_held_text_and_an_incomplete_character_in_order() -> None:
    tokens = [*TOKENIZER.encode("one EN"), REFERENCE.token_to_id(BYTE_LETTERS[0xF0])]
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop="END"))
    shown = detokenizer.push(tokens), detokenizer.flush()
    assert shown == ("one ", "EN\ufffd"), f"push and flush show {shown}"
    stopped = Detokenizer(TOKENIZER, SamplingParams(stop="EN\ufffd"))
    shown = stopped.push(tokens) + stopped.flush()
    assert shown == "one ", (
        f"an incomplete character becomes U+FFFD and completes the stop string, but {shown!r} is shown"
    )
    assert stopped.stopped == "EN\ufffd"


# The scanner for stop strings, by itself.

few_letters = st.text("ab", min_size=1, max_size=6)  # few, so that stop strings overlap with themselves and each other


def scan(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = "".join([*map(scanner.push, parts), scanner.held()])
    return shown, scanner.matched


@given(st.lists(few_letters, min_size=0, max_size=4), st.text("abc", max_size=40), st.lists(st.integers(0, 40)))
@example(["aaab", "aba"], "abbaaaab", [1, 2, 3])  # failed matches: another one begins inside the second alone
@example(["abab", "ba"], "abab", [2])
@example(["b", "ab"], "ab", [])  # both complete on one character: the longest wins
def test_finds_what_brute_force_finds_however_the_text_is_split(stops: list[str], text: str, cuts: list[int]) -> None:
    found, wanted = scan(stops, cut(text, cuts)), brute_force(stops, text)
    assert found == wanted, f"text and match must be {wanted}, are {found}: {stops} in {cut(text, cuts)}"


@given(st.lists(few_letters, min_size=1, max_size=4), st.text("abc", max_size=40))
def test_holds_back_exactly_the_longest_possible_start_of_a_stop_string(stops: list[str], text: str) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for n, letter in enumerate(text, 1):
        shown += scanner.push(letter)
        if scanner.matched is not None:
            break
        held = text[len(shown) : n]
        longest = max(k for stop in stops for k in range(len(stop)) if text[:n].endswith(stop[:k]))
        assert len(held) == longest, f"after {text[:n]!r}, with stop strings {stops}, {held!r} is held back"


def test_a_character_costs_the_same_however_long_the_stop_strings_are() -> None:
    """Counted in instructions of Python, not seconds. The worst text: each ending of it begins the stop string."""

    def instructions(stop: str) -> int:
        scanner, count = StopScanner([stop]), 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has these events only if one is on before
        sys.settrace(trace)
        try:
            for _ in range(400):
                scanner.push("a")
        finally:
            sys.settrace(before)
        return count

    short, long = instructions("a" * 4 + "b"), instructions("a" * 255 + "b")
    assert long < 3 * short, f"a stop string of 256 characters costs {long / short:.0f} times as much as one of 5"
