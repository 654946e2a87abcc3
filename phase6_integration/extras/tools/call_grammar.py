"""The grammar of an answer with calls: reasoning, then calls of tools or content that follows a grammar of its own.

The grammars of the content and of the arguments are parts with a name each, such as `@f0`. A grammar in Lark, the first
part, refers to them.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from phase6_integration.extras.tools.tool_formats import Reasoning, ToolFormat

MAX_CALLS = 64  # in one answer
TokenId = Callable[[str], int | None]  # of a marker, if it is one token: then a grammar must name it by its id


class Thinking(Enum):
    """How an answer may begin."""

    MAYBE = auto()  # with reasoning, if the model chooses
    BEGUN = auto()  # in the middle of it: the prompt has begun it
    OVER = auto()  # with content


class Rules(NamedTuple):
    """Rules in Lark, and the grammars that they refer to."""

    lark: list[str]
    parts: list[dict[str, Any]]


def answer_grammar(
    thinking: Thinking, reasoning: Reasoning | None, calls: Rules | None, content: str | None, token_id: TokenId
) -> str:
    """A grammar of an answer that is either `calls` or `content`, if both are given. ValueError if the content's
    grammar cannot be embedded."""
    rules, parts, either = _reasoning(thinking, reasoning, token_id), [], []
    if content is not None:
        parts.append(_part("content", content))
        either.append(f"{_literal(reasoning.content, MARKER, token_id)} @content" if reasoning else "@content")
    if calls is not None:
        rules += calls.lark
        parts += calls.parts
        either.append("calls")
    rules.append(f"answer: {' | '.join(either)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})


def _reasoning(thinking: Thinking, reasoning: Reasoning | None, token_id: TokenId) -> list[str]:
    if thinking is Thinking.OVER or reasoning is None:
        return ["start: answer"]
    end = token_id(reasoning.end)
    text = "text: TEXT " + f"<[{end}]>" if end is not None else f"text[suffix={json.dumps(reasoning.end)}]: TEXT"
    begin, after = (_literal(part, MARKER, token_id) for part in (reasoning.begin, reasoning.after))
    prefix = "thought" if thinking is Thinking.BEGUN else f"({begin} thought {'' if after else 'SPACE?'})?"
    return [f"start: {prefix} answer", f"thought: text {after}", text, r"TEXT: /(?s:.*)/", r"SPACE: /\s{1,4}/"]


MARKER = r"<\|?\w+\|?>"


def call_rules(format: ToolFormat, functions: Mapping[str, str], several: bool, token_id: TokenId) -> Rules:
    """The calls of these functions, each with the grammar of its arguments."""

    def literal(text: str) -> str:
        return _literal(text, "|".join(map(re.escape, format.markers)), token_id)

    more = f"({literal(format.between)} call){{0,{MAX_CALLS - 1}}}" if several and format.several else ""
    before, after = format.call.split("ARGUMENTS")
    return Rules(
        [
            f"calls: {literal(format.begin)} call {more} {literal(format.end)}",
            *(
                f"call{i}: {literal(before.replace('NAME', name))} @f{i} {literal(after)}"
                for i, name in enumerate(functions)
            ),
            "call: " + " | ".join(f"call{i}" for i in range(len(functions))),
        ],
        [_part(f"f{i}", grammar) for i, grammar in enumerate(functions.values())],
    )


def _literal(text: str, markers: str, token_id: TokenId) -> str:
    """A text in Lark, in which a marker that is a token is named by its id. `markers` is their pattern."""
    parts = filter(None, re.split(f"({markers})", text))
    ids = {marker: token_id(marker) for marker in re.findall(markers, text)}
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
