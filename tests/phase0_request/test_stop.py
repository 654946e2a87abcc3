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
@example(["aab"], "aaab", [1, 2, 3])  # a failed match inside which another one begins
@example(["abab", "ba"], "abab", [2])
@example(["b", "ab"], "ab", [])  # both complete on one character: the longest wins
def test_finds_what_brute_force_finds_however_the_text_is_split(stops: list[str], text: str, cuts: list[int]) -> None:
    assert scan(stops, cut(text, cuts)) == brute_force(stops, text)


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
        assert len(held) == longest


def test_no_text_after_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("one E") == "one "
    assert scanner.push("NDtwo") == ""
    assert scanner.matched == "END"
    assert scanner.push("three") == ""
    assert scanner.held() == ""


def test_held_back_text_is_shorter_than_the_stop_string() -> None:
    scanner = StopScanner(["a" * 255 + "b"])
    shown = sum(len(scanner.push("a")) for _ in range(1000))
    assert shown == 1000 - 255
    assert scanner.held() == "a" * 255
