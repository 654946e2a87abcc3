"""GBNF as llama.cpp's guide to it has it, and Lark: which one a grammar is, and the texts that it allows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase6_integration.extras.structured.client_grammars import as_lark
from tests.phase6_integration.cities import allows

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\u00e9a1"', ["éa1"], ["\ue9a1", "e9a1"]),
    (r'root ::= "\x41\u0042\U00000043\U0001F600"', ["ABC😀"], ["ABC"]),
    (r'root ::= "\[\]\-\"\\" "\t\r\n"', ['[]-"\\\t\r\n'], ["\\[\\]"]),
    (r"root ::= [\u0041-\x43\-\]\[]", list("ABC-]["), ["D", "\\", "x"]),
    (r"root ::= [^\n\x41]", ["B", "😀"], ["A", "\n"]),
    ("root ::= [a-cX-]", list("abcX-"), ["d", "Y"]),
    ("root ::= [a&&b~~^/.]", list("ab&~^/."), ["c"]),
    ("root ::= [#--]", list("#$-"), ['"', "."]),
    ("root ::= [ぁ-ゟ]+", ["ひらがな"], ["カ"]),
    ("root ::= . .", ["ab", "\n😀"], ["a"]),
    ('root ::= "a\nb"', ["a\nb"], ["ab"]),
    ('root ::= "<[5]>" [\'"]', ["<[5]>'", '<[5]>"'], ["5"]),
    ('# start: "x"\nroot ::= "#" # the "end\n', ["#"], ["x"]),
    ('root ::= (\n  # a comment\n  "1. " ("a" | "b")? [0-9]{2,3}\n)+', ["1. a12", "1. 1231. 45"], ["1. a1"]),
    ('root ::= more\nmore ::= "start: a" |\n "b"', ["start: a", "b"], ["a"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS, ids=[str(i) for i in range(len(GRAMMARS))])
def test_gbnf_allows_what_llama_cpp_says_it_does(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=8))
def test_every_character_may_be_written_as_an_escape(text: str) -> None:
    escaped = "".join(rf"\U{ord(character):08x}" for character in text)
    assert allows(f'root ::= "{escaped}"', text)
    assert allows(f"root ::= [{escaped}]+", text)


@pytest.mark.parametrize("escape", [r"\q", r"\x4", r"\u00e", r"\ud83d", r"\U00110000", "\\"])
def test_an_escape_that_gbnf_does_not_have_is_refused(escape: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        as_lark(f'root ::= "{escape}"')


@pytest.mark.parametrize(
    "lark", ['start: "a"', '?start: "a"', '!start: "a"', 'start[capture]: "a"', '// root ::= "b"\n?start : "a"']
)
def test_lark_stays_as_it_is(lark: str) -> None:
    assert as_lark(lark) == lark
    assert allows(lark, "a")


def test_a_part_of_a_grammar_in_llguidances_form_may_be_gbnf() -> None:
    parts = [{"lark_grammar": 'start: "a" @end'}, {"name": "end", "lark_grammar": 'root ::= "b" | "\\u00e9"'}]
    grammar = json.dumps({"grammars": parts})
    assert allows(grammar, "aé")
    assert not allows(grammar, "a")


def test_what_is_neither_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"Lark, as llguidance reads it, and llama.cpp's GBNF"):
        as_lark("a list of words")
