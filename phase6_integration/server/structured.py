"""Stand-in."""

from typing import Any

from llguidance import LLMatcher


def json_grammar(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
