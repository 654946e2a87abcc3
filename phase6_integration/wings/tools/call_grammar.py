"""The grammar of an answer with calls: what it may be, put together from reasoning, calls of tools, and a grammar of
the content.

The grammars of the content and of the arguments are parts with a name each, such as `@f0`. A grammar in Lark, the first
part, refers to them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from phase6_integration.wings.tools.tool_formats import ToolFormat
from phase6_integration.wings.tools.tool_reader import BEGIN, END

MAX_CALLS = 64  # in one answer
TokenId = Callable[[str], int | None]  # of a marker, if it is one token: then a grammar must name it by its id


class Thinking(Enum):
    """What an answer may begin with."""

    MAYBE = auto()  # with reasoning, if the model chooses
    BEGUN = auto()  # in the middle of it: the prompt has begun it
    OVER = auto()  # with content


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of these functions, each with the grammar of its arguments."""

    format: ToolFormat
    functions: Mapping[str, str]
    several: bool


def answer_grammar(thinking: Thinking, calls: Calls | None, content: str | None, token_id: TokenId) -> str | None:
    """A grammar of an answer that is `calls` or `content`, whichever is given; None if neither is. ValueError if that
    of the content cannot be a part of it."""
    if calls is None and (content is None or thinking is Thinking.OVER):
        return content
    rules, parts, either = _reasoning(thinking, token_id), [], []
    if content is not None:
        parts.append(_part("content", content))
        either.append("@content")
    if calls is not None:
        rules += _calls(calls, token_id)
        parts += [_part(f"f{i}", grammar) for i, grammar in enumerate(calls.functions.values())]
        either.append("calls")
    rules.append(f"answer: {' | '.join(either)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def _reasoning(thinking: Thinking, token_id: TokenId) -> list[str]:
    if thinking is Thinking.OVER:
        return ["start: answer"]
    end = token_id(END)
    thought = "thought: TEXT " + f"<[{end}]>" if end is not None else f"thought[suffix={json.dumps(END)}]: TEXT"
    prefix = "thought" if thinking is Thinking.BEGUN else f"({_literal(BEGIN, (BEGIN,), token_id)} thought SPACE?)?"
    return [f"start: {prefix} answer", thought, r"TEXT: /(?s:.*)/", r"SPACE: /\s{1,4}/"]


def _calls(calls: Calls, token_id: TokenId) -> list[str]:
    form = calls.format

    def literal(text: str) -> str:
        return _literal(text, form.markers, token_id)

    more = f"({literal(form.between)} call){{0,{MAX_CALLS - 1}}}" if calls.several else ""
    rules = [f"calls: {literal(form.begin)} call {more} {literal(form.end)}"]
    for number, name in enumerate(calls.functions):
        before, after = form.call.split("ARGUMENTS")
        rules.append(f"call{number}: {literal(before.replace('NAME', name))} @f{number} {literal(after)}")
    return [*rules, "call: " + " | ".join(f"call{number}" for number in range(len(calls.functions)))]


def _literal(text: str, markers: tuple[str, ...], token_id: TokenId) -> str:
    """A text in Lark, in which a marker that is a token is named by its id."""
    parts = filter(None, re.split("(" + "|".join(map(re.escape, markers)) + ")", text))
    ids = {marker: token_id(marker) for marker in markers}
    return " ".join(json.dumps(part) if ids.get(part) is None else f"<[{ids[part]}]>" for part in parts)


def _part(name: str, grammar: str) -> dict[str, Any]:
    """A grammar, in llguidance's JSON, in Lark or in GBNF, under a name."""
    if not grammar.lstrip().startswith("{"):
        return {"name": name, "lark_grammar": grammar}
    try:
        grammars = json.loads(grammar)["grammars"]
        if len(grammars) == 1:
            return {**grammars[0], "name": name}
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except (KeyError, TypeError):
        raise ValueError("the grammar is not in llguidance's form") from None
    raise ValueError("a grammar of several parts cannot stand beside tools or reasoning")
