"""Reasoning before an answer, what a request gives the chat template, and messages that are continued."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from phase0_request.tokenizer import Tokenizer
from phase6_integration import connect
from phase6_integration.connect import create_app
from phase6_integration.extras.tools.call_grammar import Thinking
from phase6_integration.extras.tools.tools import thinking_after
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.extras.tools.test_tools import ARGUMENTS, CALL, TOOLS, allows, deltas
from tests.phase6_integration.fake_engine import FakeEngine, says
from tests.phase6_integration.speaker import Speaker, model_of, speaking

HELLO: Any = [{"role": "user", "content": "Is it four?"}]
# In the manner of Qwen3: it thinks unless it is told not to, and the prompt then says that it has.
TEMPLATE = """\
{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for document in documents or [] %}[{{ document.title }}]{% endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if reasoning_effort %}{{ 'effort ' + reasoning_effort }}{% endif -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if begun %}{{ '<think>\\n' }}{% endif -%}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""
CONTROL = ("<think>", "</think>")  # special in some vocabularies, and then not in the text
ANSWER = "<think>\nTwo and two.\n</think>\n\nYes, four."


@pytest.fixture(scope="module", params=[(), CONTROL], ids=["text", "control tokens"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    with speaking(model=model_of(tmp_path_factory.mktemp("model"), TEMPLATE, request.param)) as speaker:
        yield speaker


def ask(speaker: Speaker, text: str, **given: Any) -> Any:
    speaker.text = text
    extra = {
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
        "documents",
        "include_reasoning",
    }
    body = {name: given.pop(name) for name in extra & given.keys()}
    create: Any = speaker.client.chat.completions.create
    return create(**{"model": "tiny_chat", "messages": HELLO, "extra_body": body, **given})


@pytest.mark.parametrize(
    ("given", "text", "reasoning", "content"),
    [
        ({}, ANSWER, "Two and two.", "Yes, four."),
        ({}, "Yes.", None, "Yes."),
        ({"chat_template_kwargs": {"begun": True}}, "Two.</think>Yes.", "Two.", "Yes."),
        ({"include_reasoning": False}, ANSWER, None, "Yes, four."),
        ({"tools": TOOLS}, f"<think>Hm.</think>\n\n{CALL}", "Hm.", None),
    ],
)
def test_reasoning_is_told_apart_whole_and_streamed(
    thinker: Speaker, given: dict[str, Any], text: str, reasoning: str | None, content: str | None
) -> None:
    whole, chunks = ask(thinker, text, **given).choices[0], deltas(ask(thinker, text, stream=True, **given))
    message, stream = whole.message, [one.delta for one in chunks]
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
    arguments = ARGUMENTS if content is None else ""
    assert whole.finish_reason == chunks[-1].finish_reason == ("tool_calls" if arguments else "stop")
    assert "".join(call.function.arguments for call in message.tool_calls or ()) == arguments
    streamed = [call for one in stream for call in one.tool_calls or ()]
    assert "".join(call.function.arguments for call in streamed) == arguments
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in stream) == (reasoning or "")
    assert "".join(one.content or "" for one in stream) == (content or "")


@pytest.mark.usefixtures("one_tokenizer")
def test_while_hidden_reasoning_comes_comments_keep_the_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which ten seconds pass between any two looks."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("phase6_integration.api.streaming.time", SimpleNamespace(monotonic=lambda: next(clock)))

    @awaited
    async def test() -> None:
        app = create_app(FakeEngine(says(ANSWER)), connect.settings(keepalive=15.0, reasoning_parser="qwen3"))
        asked = {"messages": HELLO, "stream": True, "include_reasoning": False, "max_tokens": 100}
        async with Call(app, "/v1/chat/completions", asked) as call:
            pass
        assert call.content.count(b": keep-alive\n\n") >= 2
        assert b"Two and two" not in call.content
        assert call.events[-1] == "[DONE]"

    test()


def test_reasoning_that_is_cut_off_is_no_content(thinker: Speaker) -> None:
    one = ask(thinker, ANSWER, max_tokens=8).choices[0]
    assert (one.finish_reason, one.message.content) == ("length", None)
    assert "Two and two.".startswith(one.message.reasoning_content)


@pytest.mark.parametrize(
    ("variables", "with_thought", "without"),
    [
        ({}, "<think>Hm.</think>\n\n", True),
        ({"begun": True}, "Hm.</think>", False),
        ({"enable_thinking": False}, "", True),
    ],
)
def test_a_grammar_begins_after_the_reasoning(
    thinker: Speaker, variables: Any, with_thought: str, without: bool
) -> None:
    call = CALL.replace(ARGUMENTS, '{"city":"Bern","days":2}')
    ask(thinker, call, tools=TOOLS, tool_choice="required", chat_template_kwargs=variables)
    assert allows(thinker, with_thought + call)
    assert allows(thinker, call) is without
    assert not allows(thinker, f"{with_thought}Well, {call}")
    if not with_thought:
        assert not allows(thinker, f"<think>Hm.</think>{call}")


def test_reasoning_comes_back_to_the_template(thinker: Speaker) -> None:
    answer = ask(thinker, ANSWER).choices[0].message.model_dump()
    ask(thinker, "", messages=[*HELLO, answer, HELLO[0]])
    assert "<think>Two and two.</think>Yes, four." in thinker.prompt


def test_the_template_gets_its_variables(thinker: Speaker) -> None:
    ask(thinker, "", chat_template_kwargs={"enable_thinking": False, "unknown": [1]})
    assert thinker.prompt.endswith("</think>\n\n")
    ask(thinker, "", reasoning_effort="high", documents=[{"title": "A page", "text": "Of text."}])
    assert "effort high" in thinker.prompt
    assert thinker.prompt.startswith("[A page]")


def test_the_last_message_is_continued(thinker: Speaker) -> None:
    given: Any = {"messages": [*HELLO, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    ask(thinker, "", **given)
    assert thinker.prompt.endswith("assistant\nIt is ")
    ask(thinker, "", add_generation_prompt=False, **given)
    assert thinker.prompt.endswith("assistant\nIt is ")
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        ask(thinker, "", add_generation_prompt=True, **given)


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "self", "conversations"])
def test_a_variable_with_a_field_of_its_own_is_refused(thinker: Speaker, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(thinker, "", chat_template_kwargs={name: []})
    assert "chat_template_kwargs" in str(refused.value.param)


def test_tokenize_renders_the_same_prompt(thinker: Speaker) -> None:
    ask(thinker, "", tools=TOOLS, chat_template_kwargs={"begun": True})
    body = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"begun": True}}
    found = thinker.client.post("../tokenize", body=body, cast_to=object)
    assert isinstance(found, dict)
    assert tuple(found["tokens"]) == thinker.engine.submitted[-1].prompt_tokens


def test_reasoning_is_looked_for_where_the_template_knows_it_or_by_name() -> None:
    with speaking() as speaker:
        assert ask(speaker, ANSWER).choices[0].message.content == ANSWER
    with speaking(connect.settings(reasoning_parser="deepseek_r1")) as speaker:
        assert ask(speaker, ANSWER).choices[0].message.content == "Yes, four."


@pytest.mark.parametrize(
    ("end", "thinking"),
    [("<think>\n", Thinking.BEGUN), ("</think>\n\n", Thinking.OVER), ("\n", Thinking.MAYBE), ("", Thinking.MAYBE)],
)
def test_what_a_prompt_ends_with(end: str, thinking: Thinking, tmp_path: Path) -> None:
    for control in ((), CONTROL):
        tokenizer = Tokenizer.from_pretrained(model_of(tmp_path, TEMPLATE, control))
        assert thinking_after(tokenizer.encode(f"assistant\n{end}"), tokenizer) is thinking
