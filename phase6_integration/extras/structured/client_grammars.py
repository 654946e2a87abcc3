"""ClientGrammars: compiles the grammars of requests. Its errors are written for the response.

It runs in a process with limits of time and memory (`grammar_worker`).
"""

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from phase2_prefill_decode.extras.grammar.grammar import Grammars
from phase6_integration.extras.structured.exact_numbers import check_numbers
from phase6_integration.extras.structured.gbnf import is_gbnf, plain

REFUSED = "the grammar cannot be used: "  # as an error of Grammars begins
ACCEPTED = "accepted are Lark, as llguidance reads it, and llama.cpp's GBNF"
_JSON = re.compile(r"%json\s*(?=\{)")
_TOO_COMPLEX = re.compile(r"panic|too (large|big|complex|many)|fuel|Current row has")


class ClientGrammars(Grammars):
    """Compiles llguidance's grammars, as JSON or Lark, and GBNF."""

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            lark = as_lark(grammar)
        except RecursionError:
            raise ValueError("the grammar is nested too deeply") from None
        try:
            compiled = super()._compile(lark)
        except ValueError as error:
            raise ValueError(explain(str(error))) from None
        for warning in compiled.get_grammar_warnings():  # of what would be ignored
            raise ValueError(explain(warning))
        first = compiled.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise ValueError(explain(first.get_error()))
        return compiled


def as_lark(grammar: str) -> str:
    """Convert GBNF to Lark, and keep everything else. ValueError if it is neither, or contains a number that would
    be changed."""
    if not grammar.lstrip().startswith("{"):
        return _text_as_lark(grammar)
    try:  # llguidance's own form, whose parts may be GBNF too
        whole = json.loads(grammar)
        for part in whole["grammars"]:
            check_numbers(part.get("json_schema"))
            if "lark_grammar" in part:
                part["lark_grammar"] = _text_as_lark(part["lark_grammar"])
    except (TypeError, KeyError, AttributeError):
        raise ValueError("the grammar is not in llguidance's form") from None
    return json.dumps(whole)


def _text_as_lark(grammar: str) -> str:
    if ":" not in grammar:
        raise ValueError(f"the grammar has no rule; {ACCEPTED}")
    if not is_gbnf(grammar):
        _check_embedded(grammar)
        return grammar
    try:
        return gbnf_to_lark(plain(grammar))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"the grammar cannot be read: {error}; {ACCEPTED}") from None


def _check_embedded(lark: str) -> None:
    """Check the JSON schemas within a grammar in Lark."""
    for begin in _JSON.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, begin.end())
        except json.JSONDecodeError:  # llguidance says where
            continue
        check_numbers(schema)


def explain(message: str) -> str:
    """llguidance's message, reworded where it speaks of options that a client does not have."""
    if "oneOf constraints" in message:
        return "oneOf can be enforced only where no two of its schemas allow the same value; use anyOf"
    if "NoExtension" in message:
        return "the grammar cannot be met: it allows no text"
    if _TOO_COMPLEX.search(message):
        return "the grammar is too large or too complex"
    return f"{REFUSED}{' '.join(message.removeprefix(REFUSED).split())}"
