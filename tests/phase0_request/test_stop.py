import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phase0_request.detokenizer import StopScanner
from tests.phase0_request.support import brute_force, cut

few_letters = st.text("ab", min_size=1, max_size=6)  # few, so that stop strings overlap with themselves and each other


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = "".join([*map(scanner.push, pieces), scanner.held()])
    return shown, scanner.matched


@given(st.lists(few_letters, min_size=0, max_size=4), st.text("abc", max_size=40), st.lists(st.integers(0, 40)))
@example(["aab"], "aaab", [1, 2, 3])  # a failed start inside which another start begins
@example(["abab", "ba"], "abab", [2])
@example(["b", "ab"], "ab", [])  # both complete on one letter: the longer hides more
def test_it_finds_what_brute_force_finds_however_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    assert scan(stops, cut(text, cuts)) == brute_force(stops, text)


@given(st.lists(few_letters, min_size=1, max_size=4), st.text("abc", max_size=40))
def test_it_holds_back_what_may_begin_a_stop_and_no_more(stops: list[str], text: str) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for n, letter in enumerate(text, 1):
        shown += scanner.push(letter)
        if scanner.matched is not None:
            break
        held = text[len(shown) : n]
        longest = max(k for stop in stops for k in range(len(stop)) if text[:n].endswith(stop[:k]))
        assert len(held) == longest


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("one E") == "one "
    assert scanner.push("NDtwo") == ""
    assert scanner.matched == "END"
    assert scanner.push("three") == ""
    assert scanner.held() == ""


@pytest.mark.parametrize("repeats", [1000])
def test_a_long_near_miss_costs_each_letter_once(repeats: int) -> None:
    """The held-back text stays as short as the stop string, whatever comes."""
    scanner = StopScanner(["a" * 255 + "b"])
    shown = sum(len(scanner.push("a")) for _ in range(repeats))
    assert shown == repeats - 255
    assert scanner.held() == "a" * 255
