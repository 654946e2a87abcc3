"""Tool calls and reasoning in the text of an answer: what each format means, and that its pieces do not matter."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.extras.tools.tool_formats import BY_NAME
from phase6_integration.extras.tools.tool_reader import ToolReader

NAMES = ("add", "add_all", "get_weather")
WEATHER = '{"city": "Bern } \\" ]", "days": [1, {"a": null}]}'
Found = list[tuple[str, str]]


def reader(name: str) -> ToolReader:
    return ToolReader(reasons=True) if name == "think" else ToolReader(BY_NAME[name], NAMES)


def pushed(reader: ToolReader, text: str, last: bool = False) -> Found:
    """What is new: content, reasoning, names of calls, and arguments."""
    found = [("content", content)] if (content := reader.push(text, last)) else []
    new = reader.take()
    found += [("reasoning", new["reasoning_content"])] if "reasoning_content" in new else []
    for call in new.get("tool_calls", ()):
        function = call["function"]
        found += [("call", function["name"])] if "name" in function else []
        found += [("arguments", function["arguments"])] if function["arguments"] else []
    return found


def joined(found: Found) -> Found:
    """Reasoning, content and calls, each in one piece, in this order."""
    whole: dict[tuple[int, str], str] = {}
    calls = 0
    for kind, text in found:
        calls += kind == "call"
        place = (calls + 1, kind) if kind in ("call", "arguments") else (kind == "content", kind)
        whole[place] = whole.get(place, "") + text
    return [(kind, text) for (_, kind), text in sorted(whole.items(), key=lambda item: item[0][0])]


def find(reader: ToolReader, *pieces: str) -> Found:
    last = len(pieces) - 1
    return joined([one for number, piece in enumerate(pieces) for one in pushed(reader, piece, number == last)])


def call(name: str, arguments: str) -> Found:
    return [("call", name), ("arguments", arguments)]


def said(text: str) -> Found:
    return [("content", text)] if text else []


ADD = call("add", '{"a": 1}')
HERMES: list[tuple[str, Found]] = [
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ADD),
    ('Let me see.\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n', said("Let me see.") + ADD),
    (
        f'So <tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>',
        said("So") + call("get_weather", WEATHER),
    ),
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
    ("<think>\nIs it 4?\n</think>\n\nYes. ", [("reasoning", "Is it 4?"), ("content", "Yes. ")]),
    ("\n<think></think>Yes.", said("Yes.")),
    ("<think>For ever <b> and </thin", [("reasoning", "For ever <b> and </thin")]),
    (" No <think>, no </think>.", said(" No <think>, no </think>.")),
    ("<thin", said("<thin")),
]
TEXTS = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA, "think": THINK}
CASES = [(name, text, joined(found)) for name, cases in TEXTS.items() for text, found in cases]

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


@pytest.mark.parametrize(("name", "text", "found"), CASES)
def test_what_a_text_means_wherever_it_is_split(name: str, text: str, found: Found) -> None:
    for split in range(len(text) + 1):
        assert find(reader(name), text[:split], text[split:]) == found, text[:split]
    assert find(reader(name), *text, "") == found


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    if name == "llama3_json" or not text.startswith("{"):
        assert find(reader(name), text) == said(text)
        assert find(reader(name), *text, "") == said(text)


words = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "', "add", '", '),
        *('"arguments": ', '{"a": 1}', "}", "[", "]", ",", ";", " ", "\n", "text", '"', "\\", "<", "{", "<think>"),
        *("</think>", '{"name": "add", "arguments": {"a": 1}}'),
    ]
)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=150)
@given(pieces=st.lists(words, max_size=12), data=st.data())
def test_no_split_of_any_text_changes_what_it_means(name: str, pieces: Sequence[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    split = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert find(reader(name), *split) == find(reader(name), text)


def test_arguments_are_streamed_as_they_come() -> None:
    hermes = reader("hermes")
    assert pushed(hermes, 'Hi <tool_call>{"name": "add", "arg') == [("content", "Hi")]
    assert pushed(hermes, 'uments": {"a') == [("call", "add"), ("arguments", '{"a')]
    assert pushed(hermes, '": 1') == [("arguments", '": 1')]
    assert pushed(hermes, "}") == [("arguments", "}")]
    assert pushed(hermes, "}</tool_call>", last=True) == []


def test_text_that_could_begin_a_call_waits_for_what_follows() -> None:
    hermes = reader("hermes")
    assert pushed(hermes, "a < b <tool") == [("content", "a < b")]
    assert pushed(hermes, "box") == [("content", " <toolbox")]


def test_reasoning_that_the_prompt_has_begun() -> None:
    text = "Well.\n</think>\n\nYes"
    assert find(ToolReader(reasons=True, begun=True), text) == [("reasoning", "Well."), ("content", "Yes")]
    assert find(ToolReader(reasons=True, begun=True), "Well.") == [("reasoning", "Well.")]


def test_long_arguments_are_valid_json_in_the_end() -> None:
    arguments = json.dumps({"text": 'a "quoted" \\ {brace]' * 2000, "list": [[{}]] * 500})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
    assert find(reader("hermes"), *pieces) == call("add", arguments)
