"""Prompt lookup. The oracle is a search through the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from phase5_continuous.extras.speculation.ngram import NgramIndex


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 8))
def test_an_ngram_is_continued_as_it_was_the_last_time(text: list[int], shortest: int, more: int, most: int) -> None:
    index, longest = NgramIndex(shortest, shortest + more), shortest + more
    index.extend(text[:20])
    index.extend(text[20:])
    wanted = list[int]()
    for length in range(longest, shortest - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            wanted = [*text]
            while len(wanted) < len(text) + most:
                wanted.append(wanted[ends[-1] + len(wanted) - len(text)])
            wanted = wanted[len(text) :]
            break
    found = index.continuation(most)
    assert found == wanted, f"after {text}, by matches of {shortest} to {longest} tokens, {most} more"
