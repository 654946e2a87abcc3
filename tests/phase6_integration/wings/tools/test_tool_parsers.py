"""Tool calls and reasoning in the text of an answer: what each format means, and that its pieces do not matter."""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.wings.tools.incremental import (
    AnswerDelta,
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    IncrementalParser,
    ReasoningDelta,
)
from phase6_integration.wings.tools.reasoning import ThinkParser
from phase6_integration.wings.tools.tool_parsers import HermesParser, LlamaParser, MistralParser

NAMES = ("add", "add_all", "get_weather")
WEATHER = '{"city": "Bern } \\" ]", "days": [1, {"a": null}]}'
Found = list[tuple[type[AnswerDelta], str]]


def find(parser: IncrementalParser, *pieces: str) -> Found:
    """The events, with neighbours of one kind joined."""
    found: Found = []
    for number, piece in enumerate(pieces, 1):
        for event in parser.push(piece, number == len(pieces)):
            if found and found[-1][0] is type(event) is not CallStart:
                found[-1] = (type(event), found[-1][1] + event.text)
            else:
                found.append((type(event), event.text))
    return found


def call(name: str, arguments: str) -> Found:
    return [(CallStart, name), (ArgumentsDelta, arguments)]


def said(text: str) -> Found:
    return [(ContentDelta, text)] if text else []


ADD = call("add", '{"a": 1}')
HERMES: list[tuple[str, Found]] = [
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ADD),
    ('Let me see.\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n', said("Let me see.") + ADD),
    (f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>', call("get_weather", WEATHER)),
    ('<tool_call>{"arguments": {"name": "add_all"}, "name": "add"}</tool_call>', call("add", '{"name": "add_all"}')),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add_all", "arguments": {}}\n</tool_call> Done.',
        ADD + call("add_all", "{}") + said("Done."),
    ),
    ('<tool_call>{"name": "add"}</tool_call>', call("add", "{}")),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', ADD),  # without the end
    ('<tool_call>{"name": "add", "arguments": {"a": "<tool_call>', call("add", '{"a": "<tool_call>')),  # cut off
]
MISTRAL: list[tuple[str, Found]] = [
    ('[TOOL_CALLS][{"name": "add", "arguments":{"a": 1}}]', call("add", '{"a": 1}')),
    ('[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 1} } ]', ADD),
    ('[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "add"}]', call("add", '{"name": "John Doe"}')),
    (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments":{"city": "x"}]',
        ADD + call("get_weather", '{"city": "x"}'),
    ),
    ('[TOOL_CALLS]add{"a": 1}', ADD),
    ('Now. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add_all[ARGS]{}', said("Now.") + ADD + call("add_all", "{}")),
    ('[TOOL_CALLS]add_all[CALL_ID]abcdef123[ARGS]{"a": 1}', call("add_all", '{"a": 1}')),
    ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdef123"}]', ADD),
]
LLAMA: list[tuple[str, Found]] = [
    ('{"name": "add", "parameters": {"a": 1}}', ADD),
    (' \n{"name": "add", "arguments": {"a": 1}}', ADD),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ADD),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', ADD),
    (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add_all", "parameters": {}}',
        ADD + call("add_all", "{}"),
    ),
    ('{"name": "add", "parameters": {"a": 1}}\n{"name": "add", "parameters": {"a": 1}}', ADD + ADD),
]
THINK: list[tuple[str, Found]] = [
    ("<think>\nIs it 4?\n</think>\n\nYes. ", [(ReasoningDelta, "Is it 4?"), (ContentDelta, "Yes. ")]),
    ("\n<think></think>Yes.", said("Yes.")),
    ("<think>For ever <b> and </thin", [(ReasoningDelta, "For ever <b> and </thin")]),
    (" No <think>, no </think>.", said(" No <think>, no </think>.")),
    ("<thin", said("<thin")),
]
PARSERS: dict[str, tuple[Callable[[], IncrementalParser], list[tuple[str, Found]]]] = {
    "hermes": (lambda: HermesParser(NAMES), HERMES),
    "mistral": (lambda: MistralParser(NAMES), MISTRAL),
    "llama3_json": (lambda: LlamaParser(NAMES), LLAMA),
    "think": (lambda: ThinkParser(begun=False), THINK),
}
CASES = [(make, text, found) for make, cases in PARSERS.values() for text, found in cases]

# What looks like a call and is none. It comes back whole, character by character.
MALFORMED = [
    "<tool_call>",
    "<tool_call>add(1)</tool_call>",
    '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',  # not one of the tools
    '<tool_call>{"name": "ad", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "reason": "none"}</tool_call>',
    '<tool_call>{"name": 5}</tool_call> <tool_call>[]</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call> <tool_call>{"name": "a',
    "[TOOL_CALLS] [  ",
    "[TOOL_CALLS]subtract{}",
    "[TOOL_CALLS]add[ARGS]5",
    "[TOOL_CALLS]addition{}",
    '{"answer": 42}',
    '{"name": "John", "age": 30}',
    '{"name": "add", "age": 30}',
    "<|python_tag|>print(1)",
    'He said {"name": "add", "parameters": {}}',
    "a < b, <tool, [TOOL, <|python",
    " \n ",
    "",
]


@pytest.mark.parametrize(("make", "text", "found"), CASES)
def test_what_a_text_means(make: Callable[[], IncrementalParser], text: str, found: Found) -> None:
    assert find(make(), text) == found


@pytest.mark.parametrize(("make", "text", "found"), CASES)
def test_it_means_the_same_wherever_it_is_split(make: Callable[[], IncrementalParser], text: str, found: Found) -> None:
    for split in range(len(text) + 1):
        assert find(make(), text[:split], text[split:]) == found, text[:split]
    assert find(make(), *text, "") == found


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_call_is_content(text: str) -> None:
    for cls in (HermesParser, MistralParser, LlamaParser):
        if cls is not LlamaParser and text.startswith("{"):
            continue
        assert find(cls(NAMES), text) == said(text)
        assert find(cls(NAMES), *text, "") == said(text)


words = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "', "add", '", '),
        *('"arguments": ', '{"a": 1}', "}", "[", "]", ",", ";", " ", "\n", "text", '"', "\\", "<", "{", "<think>"),
        *("</think>", '{"name": "add", "arguments": {"a": 1}}'),
    ]
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150)
@given(pieces=st.lists(words, max_size=12), data=st.data())
def test_no_split_of_any_text_changes_what_it_means(name: str, pieces: Sequence[str], data: st.DataObject) -> None:
    make, text = PARSERS[name][0], "".join(pieces)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    split = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert find(make(), *split) == find(make(), text)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = HermesParser(NAMES)
    assert parser.push('Hi <tool_call>{"name": "add", "arg') == [ContentDelta("Hi")]
    assert parser.push('uments": {"a') == [CallStart("add"), ArgumentsDelta('{"a')]
    assert parser.push('": 1') == [ArgumentsDelta('": 1')]
    assert parser.push("}") == [ArgumentsDelta("}")]
    assert parser.push("}</tool_call>", last=True) == []


def test_text_that_could_begin_a_call_waits_for_what_follows() -> None:
    parser = HermesParser(NAMES)
    assert parser.push("a < b <tool") == [ContentDelta("a < b")]
    assert parser.push("box") == [ContentDelta(" <toolbox")]


def test_reasoning_that_the_prompt_has_begun() -> None:
    assert find(ThinkParser(begun=True), "Well.\n</think>\n\nYes") == [(ReasoningDelta, "Well."), (ContentDelta, "Yes")]
    assert find(ThinkParser(begun=True), "Well.") == [(ReasoningDelta, "Well.")]


def test_long_arguments_are_valid_json_in_the_end() -> None:
    arguments = json.dumps({"text": 'a "quoted" \\ {brace]' * 2000, "list": [[{}]] * 500})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
    assert find(HermesParser(NAMES), *pieces) == call("add", arguments)
