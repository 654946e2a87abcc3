"""A schema of cities, and whether a text is one of a grammar's: judged by llguidance's matcher."""

from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from phase0_request.grammar import LIMITS, vocabulary
from phase0_request.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_pretrained()
CITY = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"^\w+$"}}, "required": ["name"]}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@cache
def tokens() -> LLTokenizer:
    return vocabulary(TOKENIZER)


def allows(grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's, from its first character to its last."""
    matcher = LLMatcher(tokens(), grammar, limits=LIMITS, log_level=0)
    given = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()
