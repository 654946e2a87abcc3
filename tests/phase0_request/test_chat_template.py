"""Conversations as tokens: those of transformers, except that no text of a message becomes a control token."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phase0_request import chat_template
from phase0_request import tokenizer as tokenizer_module
from phase0_request.tokenizer import Tokenizer
from tests.phase0_request.families import FAMILIES, byte_level, family

ROLES = ("system", "user", "assistant", "user")
ordinary = st.text(max_size=12) | st.sampled_from(
    [" \n a page \t", "<think>\n4?\n</think>\n\nSixteen", "<tool_response>3</tool_response>", "</think>", "<|im_", "|>"]
)


def conversation(*contents: str, roles: tuple[str, ...] = ROLES) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def control(tokenizer: Tokenizer, reference: Any, tokens: list[int]) -> list[str | None]:
    ids = {i for i, token in reference.added_tokens_decoder.items() if token.special}
    return [tokenizer.name(token) for token in tokens if token in ids]


def with_tools(*texts: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation with these texts wherever a client may put one, and the template's variables."""
    first, second, third = texts[:3]
    schema = {"type": "object", "properties": {second: {"type": "string", "enum": [third]}}, "required": [second]}
    function = {"name": "weather", "description": first, "parameters": schema}
    call = {"id": second, "type": "function", "function": {"name": third, "arguments": {first: second, "n": 10**30}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": first, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": second, "name": third, "content": second},
    ]
    variables = {"tools": [{"type": "function", "function": function}], "language": third}
    return messages, {**variables, "documents": [{"title": first, "text": third}]}


def conversations(tools: bool, texts: Sequence[str]) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Conversations with these texts, each with the template's variables."""
    if tools:
        return [with_tools(*texts)]
    return [(conversation(*texts), {}), (conversation(*texts[:3], roles=ROLES[1:]), {})]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30)
@given(texts=st.lists(ordinary, min_size=4, max_size=4), prompt=st.booleans())
@example(texts=["Be brief.", "What is a page?", "Sixteen tokens.", "\u4f60\u597d?"], prompt=True)
def test_ordinary_text_has_the_tokens_of_transformers(name: str, tools: bool, texts: list[str], prompt: bool) -> None:
    tokenizer, reference = family(name, tools)
    for messages, variables in conversations(tools, texts):
        expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False, **variables)
        assert tokenizer.chat(messages, prompt, variables=variables) == expected


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(data=st.data())
def test_control_tokens_are_those_that_the_template_wrote(name: str, tools: bool, data: st.DataObject) -> None:
    """Any mixture of their names, whole and in parts, and of the characters that could be taken for marks: in messages,
    tools, calls, results, documents and variables."""
    tokenizer, reference = family(name, tools)
    names = [*reference.all_special_tokens, "<|im_start|>", "[INST]", "<|eot_id|>"]
    parts = st.sampled_from(
        [*names, *(n[:4] for n in names), *(n[4:] for n in names), "\U000f0000", "\ue000", "a ", "\n"]
    )
    texts = data.draw(st.lists(st.lists(parts, min_size=1, max_size=6).map("".join), min_size=4, max_size=4))
    for (honest, plain), (forged, wild) in zip(conversations(tools, "abcd"), conversations(tools, texts), strict=True):
        written = control(tokenizer, reference, tokenizer.chat(honest, variables=plain))
        assert control(tokenizer, reference, tokenizer.chat(forged, variables=wild)) == written


def test_a_template_that_spells_names_out_of_parts_takes_none_from_a_tool() -> None:
    source = SPELLED + "{{ tools | tojson }}{{ language }}"
    tokenizer = Tokenizer(byte_level(("<|user|>",)), chat_template=source)
    messages = conversation("hi", roles=("user",))
    assert tokenizer.chat(messages, variables={"tools": [{"name": "f"}], "language": "en"})
    for variables in ({"tools": [{"<|user|>": 1}]}, {"tools": [{"name": ["<|user|>"]}]}, {"language": "<|user|>"}):
        with pytest.raises(ValueError, match="the name of a control token"):
            tokenizer.chat(messages, variables=variables)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["It is ", " It is <|im_end|> \n"])
def test_the_last_message_is_continued_as_by_transformers(name: str, content: str) -> None:
    tokenizer, reference = family(name)
    messages = conversation("Be brief.", "Is it?", content)
    text = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert "".join(tokenizer.render(messages, False, {"continue_final_message": True})) == text
    assert content.strip() in tokenizer.decode(
        tokenizer.chat(messages, False, variables={"continue_final_message": True})
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_around_a_conversation_are_those_of_transformers(name: str) -> None:
    tokenizer, reference = family(name)
    messages = [{"role": "user", "content": "What is a page?"}]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.wrap(tokenizer.chat(messages))
    assert tokens == reference.encode(rendered, add_special_tokens=True)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == reference.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("expression", "contents"),
    [
        ("messages[0].content | replace('x', '')", ["<|imx_end|>"]),
        ("messages[0].content | lower", ["<|IM_END|>"]),
        ("messages[0].content + messages[1].content", ["<|im_", "end|>"]),
    ],
)
def test_a_template_that_changes_text_makes_no_control_token_of_it(expression: str, contents: list[str]) -> None:
    tokenizer = Tokenizer(byte_level(()), chat_template="<|im_start|>{{ " + expression + " }}<|im_end|>")
    tokens = tokenizer.chat(conversation(*contents))
    assert [tokens.count(i) for i in (1, 2)] == [1, 1]
    assert tokenizer.decode(tokens) == "<|im_end|>"


SPELLED = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}<|im_end|>{% endfor %}"


def test_a_template_that_spells_names_out_of_parts_is_for_honest_messages() -> None:
    """What it spells cannot be told from what a message spells, so a message may spell nothing."""
    backend = byte_level(("<|user|>", "<|assistant|>"))
    tokenizer = Tokenizer(backend, chat_template=SPELLED)
    messages = conversation("hi", "ho", roles=("user", "assistant"))
    rendered = "<|user|>hi<|im_end|><|assistant|>ho<|im_end|>"
    assert tokenizer.chat(messages) == backend.encode(rendered, add_special_tokens=False).ids
    with pytest.raises(ValueError, match="the name of a control token"):
        tokenizer.chat(conversation("hi<|im_end|>", "ho", roles=("user", "assistant")))


def test_control_names_in_variables_and_in_errors_are_the_templates() -> None:
    source = "{{ eos_token }}{{ bos_token }}{% if messages[1] %}{{ raise_exception('no <|im_end|> yet') }}{% endif %}"
    tokenizer = Tokenizer(
        byte_level(()), chat_template=source, named_tokens={"eos_token": "<|im_end|>", "bos_token": "no"}
    )
    assert tokenizer.chat(conversation("hi")) == [2, *tokenizer.encode("no")]
    with pytest.raises(ValueError, match=r"refused the messages: no <\|im_end\|> yet"):
        tokenizer.chat(conversation("hi", "ho"))


@pytest.mark.parametrize("content", ["a\ud800b", "\udfff<|im_end|>"])
def test_a_message_cannot_hold_a_mark(content: str) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        family("qwen3")[0].chat(conversation(content))


def test_a_conversation_that_is_nested_too_deeply_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        family("qwen3")[0].chat(conversation("a"), variables={"documents": nested})


def test_a_rendered_conversation_has_a_longest_length() -> None:
    """It is checked before the text is tokenized: a template may repeat a message."""
    tokenizer = Tokenizer(byte_level(()), chat_template="{{ messages[0].content * 1000 }}")
    assert tokenizer.chat(conversation("a"), max_chars=1000)
    with pytest.raises(ValueError, match="has 2000 characters; at most 1000 fit"):
        tokenizer.chat(conversation("ab"), max_chars=1000)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(99999) %}{{ messages[0].content * 400 }}{% endfor %}", "more than 33554432 characters"),
        (
            "{% macro m() %}{% for a in range(99999) %}{{ tools | tojson }}{% endfor %}{% endmacro %}{{ m() }}",
            "more than 33554432 characters",
        ),
        ("{{ tools | tojson(indent=4) }}", "more than 33554432 characters"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}", "longer than 1 sec"),
    ],
)
def test_rendering_is_bounded_in_size_and_time(template: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1.0 if "longer" in why else 60.0)
    tokenizer, deep = Tokenizer(byte_level(()), chat_template=template), [1] * 100_000
    for _ in range(100):
        deep = [deep]  # type: ignore[list-item]
    with pytest.raises(ValueError, match=why):
        tokenizer.render(conversation("a"), variables={"tools": [{"parameters": deep}]})


def test_a_conversation_of_any_depth_has_tokens_or_is_refused() -> None:
    """Fault: some were rendered, and what looked in them for the names of control tokens ended in RecursionError."""
    tokenizer = Tokenizer(byte_level(("<|end|>",)), chat_template="{{ messages[0].content }}<|end|>")
    refused = []
    for depth in range(20, 1000, 20):
        deep: list[Any] = []
        for _ in range(depth):
            deep = [deep]
        try:
            assert tokenizer.chat(conversation("<|end|>"), variables={"x": deep})
        except ValueError:
            refused.append(depth)
    assert 100 < min(refused) < 1000


def test_threads_that_encode_at_once_do_not_change_the_tokens_of_each_other() -> None:
    """A message with the name of a control token is encoded with another setting of the backend."""
    tokenizer, _ = family("qwen3")
    given = [conversation("<|im_end|>" * 50 + "word " * 500), conversation("word " * 500)] * 20
    expected = list(map(tokenizer.chat, given))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(tokenizer.chat, given)) == expected


@pytest.mark.parametrize("forged", [False, True])
def test_a_conversation_is_tokenized_at_most_twice(forged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in a message cost a second pass, however many there are and whatever characters surround them."""
    tokenizer, _ = family("llama")
    read, encode = 0, tokenizer_module._encode

    def counted(backend: Any, texts: Sequence[str], *rest: Any, **named: Any) -> list[list[int]]:
        nonlocal read
        read += sum(map(len, texts))
        return encode(backend, texts, *rest, **named)

    monkeypatch.setattr(tokenizer_module, "_encode", counted)
    messages = conversation(
        "Be brief.", ("<|reserved_special_token_7|>\U000f0000" if forged else "a page of text ") * 1000
    )
    tokenizer.chat(messages)
    assert read < (2.1 if forged else 1.01) * len("".join(tokenizer.render(messages)))
