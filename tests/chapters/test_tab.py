"""What a browser's tab runs in place of native libraries. The oracle is the library."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from chapters.book.tab import tokenizers as stand_in
from phase0_request.tokenizer import BUNDLED

FILE = str(BUNDLED / "tokenizer.json")
OURS, THEIRS = stand_in.Tokenizer.from_file(FILE), tokenizers.Tokenizer.from_file(FILE)
PARTS = st.sampled_from(
    ["<|im_end|>", "we'll", "It'S\n\n", "  two\t", " 2026", "caf\u00e9", "\u4f60\u597d", "a\u0301", "\U0001f680"]
)


@given(st.lists(PARTS | st.text(max_size=6)).map("".join))
def test_a_text_has_the_tokens_of_the_library_and_they_its_text(text: str) -> None:
    tokens = OURS.encode(text).ids
    assert tokens == THEIRS.encode(text).ids
    for skip in (False, True):
        assert OURS.decode(tokens, skip) == THEIRS.decode(tokens, skip)
