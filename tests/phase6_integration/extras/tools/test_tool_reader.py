"""Tool calls and reasoning in the text of an answer: what each format means, and that its pieces do not matter."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.extras.tools.harmony import HarmonyReader
from phase6_integration.extras.tools.tool_formats import BY_NAME
from phase6_integration.extras.tools.tool_reader import ToolReader

STRINGS: dict[str, Any] = {
    "properties": {"city": {"type": "string"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
}
FUNCTIONS: dict[str, dict[str, Any]] = {"add": {}, "add_all": {}, "get_weather": STRINGS}
WEATHER = '{"city": "Bern } \\" ]", "days": [1, {"a": null}]}'
Found = list[tuple[str, str]]


def reader(name: str) -> ToolReader:
    kind = HarmonyReader if name == "openai" else ToolReader
    return ToolReader(reasons=True) if name == "think" else kind(BY_NAME[name], FUNCTIONS)


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
ELEMENTS: list[tuple[str, Found]] = [
    ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ADD),
    (
        "So.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n5 <b>\nBern\n\n</parameter>\n<parameter=note>\n"
        "null\n</parameter>\n<parameter=days>\n[1, {}]\n</parameter>\n<parameter=wet>\nTrue\n</parameter>\n</function>"
        "\n</tool_call>",
        said("So.") + call("get_weather", '{"city": "5 <b>\\nBern\\n", "note": null, "days": [1, {}], "wet": true}'),
    ),
    (
        "<tool_call><function=add></function></tool_call>\n<tool_call><function=get_weather><parameter=city>5</parameter>"
        "</function></tool_call>",
        call("add", "{}") + call("get_weather", '{"city": "5"}'),
    ),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ADD),  # which a grammar has it write
    ("<tool_call><function=add><parameter=a>NaN</parameter></function></tool_call>", call("add", '{"a": "NaN"}')),
]
LFM2: list[tuple[str, Found]] = [
    ("<|tool_call_start|>[add(a=1)]<|tool_call_end|>", ADD),
    (
        """Hm.<|tool_call_start|>[get_weather(city='Bern ")] ', days=[1, {"a": None}]), add()]<|tool_call_end|>Wait.""",
        said("Hm.")
        + call("get_weather", '{"city": "Bern \\")] ", "days": [1, {"a": null}]}')
        + call("add", "{}")
        + said("Wait."),
    ),
    ("<|tool_call_start|>[add(wet=true, dry=False, z=-1.5)]", call("add", '{"wet": true, "dry": false, "z": -1.5}')),
    ('<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>', ADD),
]
OLMO3: list[tuple[str, Found]] = [
    ("<function_calls>\nadd(a=1)\nadd_all()\n</function_calls>", ADD + call("add_all", "{}")),
    ('<function_calls>\n{"name": "add", "arguments": {"a": 1}}\n</function_calls>', ADD),
]
GRANITE: list[tuple[str, Found]] = [
    ('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "add_all"}]', ADD + call("add_all", "{}")),
    ('<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>', ADD),
    ('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>Done.', ADD + said("Done.")),
]
ANALYSIS = "<|channel|>analysis<|message|>Is it 4?<|end|><|start|>assistant"
HARMONY: list[tuple[str, Found]] = [
    (f"{ANALYSIS}<|channel|>final<|message|>Yes.", [("reasoning", "Is it 4?"), ("content", "Yes.")]),
    ("<|channel|>final<|message|>Yes. <|return|>", said("Yes.")),
    (
        f'{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        [("reasoning", "Is it 4?"), *ADD],
    ),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ADD),
    (
        "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary to=add_all<|message|>{}",
        said("I ask.") + call("add_all", "{}"),
    ),
    (
        "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>final<|message|>So.",
        said("I ask.\n\nSo."),
    ),
    ("<|channel|>analysis<|message|>For ever", [("reasoning", "For ever")]),
    ("Yes, <|channel", said("Yes, <|channel")),
    (
        "<|channel|>commentary to=functions.subtract<|message|>{}<|call|>",
        said("<|channel|>commentary to=functions.subtract<|message|>{}"),
    ),
    ('<|channel|>commentary to=functions.add<|message|>{"a": <|end|>', call("add", '{"a": <|end|>')),  # cut off
]
TEXTS = {
    "hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA, "think": THINK, "qwen3_coder": ELEMENTS, "lfm2": LFM2,
    "olmo3": OLMO3, "granite": GRANITE, "openai": HARMONY,
}  # fmt: skip
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
    "<tool_call><function=subtract></function></tool_call>",
    "<tool_call><function=add><parameter=a>1</function>",
    "<tool_call><function=add><parameter=a>1e999</parameter></function></tool_call>",
    '<tool_call><function=add><parameter=a>["\\ud800"]</parameter></function></tool_call>',
    "<|tool_call_start|>[subtract()]<|tool_call_end|>",
    "<|tool_call_start|>[add(1)]<|tool_call_end|>",
    "<|tool_call_start|>[add(a=b)]<|tool_call_end|>",
    "<|tool_call_start|>[add(a=1e999)]",
    "<|tool_call_start|>[add(**{'a': 1})]",
    "<|tool_call_start|>[add(a='\\ud800')]",
    f"<function_calls>add(a={'(' * 300}",
    "<function_calls>add(a=1",
    '<|tool_call|>["add"]',
    " \n ",
    "",
]


@pytest.mark.parametrize(("name", "text", "found"), CASES)
def test_what_a_text_means_wherever_it_is_split(name: str, text: str, found: Found) -> None:
    for split in range(len(text) + 1):
        assert find(reader(name), text[:split], text[split:]) == found, text[:split]
    assert find(reader(name), *text, "") == found


@pytest.mark.parametrize("schema", [{"enum": ["1", "2"]}, {"const": "1"}, {"enum": [1, "1"]}])
def test_an_argument_that_may_be_one_of_some_strings_stays_a_string(schema: dict[str, Any]) -> None:
    functions = {"add": {"properties": {"a": schema}}}
    text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    assert find(ToolReader(BY_NAME["qwen3_coder"], functions), text) == call("add", '{"a": "1"}')


def test_the_channels_after_a_malformed_call_are_read() -> None:
    call = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>oops"
    text = f"{call}<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>It is 4."
    for split in range(len(text) + 1):
        found = dict(find(reader("openai"), text[:split], text[split:]))
        assert found["reasoning"] == "Hm."
        assert "oops" in found["content"]
        assert found["content"].endswith("It is 4.")
        assert "<|start|>" not in found["content"]


def test_channels_that_the_prompt_has_begun() -> None:
    begun = HarmonyReader(BY_NAME["openai"], FUNCTIONS, begun=True)
    text = "Rain?<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert find(begun, text) == joined([("reasoning", "Rain?"), ("content", "Yes.")])


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
        *(
            "<|channel|>",
            "analysis",
            "final",
            "<|message|>",
            " to=functions.add",
            "<|end|>",
            "<|start|>assistant",
            "add(",
        ),
        *("a=1", ")", "<|tool_call_start|>", "<function=add>", "<parameter=a>", "</parameter>", "</function>"),
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
