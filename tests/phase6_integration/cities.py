"""A schema of cities, and whether a text is one of a grammar's: judged by llguidance's matcher."""

from functools import lru_cache
from typing import Any

from phase0_request.params import GRAMMAR_REFUSED
from phase0_request.tokenizer import Tokenizer
from phase6_integration.extras.structured.client_grammars import ClientGrammars

TOKENIZER = Tokenizer.from_pretrained()
CITY = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"^\w+$"}}, "required": ["name"]}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@lru_cache(4)
def grammars(tokenizer: Tokenizer) -> ClientGrammars:
    return ClientGrammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def refused(tokenizer: Tokenizer, grammar: str) -> str | None:
    """The error of a request with a grammar that cannot be used."""
    try:
        grammars(tokenizer).compile(grammar)
    except ValueError as error:
        return f"{GRAMMAR_REFUSED}: {error}"[:400]
    return None


def allows(grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's, from its first character to its last."""
    matcher = grammars(TOKENIZER).compile(grammar)
    given = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()
