"""ClientGrammars: compiles what clients send. An error says what is wrong with it in the words of an error response.

It runs in a process of the client's own, whose time and memory the kernel limits (`grammar_process`).
"""

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from phase2_prefill_decode.sampling.constraints import Grammars
from phase6_integration.wings.structured.exact_numbers import check_numbers
from phase6_integration.wings.structured.gbnf import is_gbnf, plain

REFUSED = "the grammar cannot be used: "  # as an error of Grammars begins
ACCEPTED = "accepted are Lark, as llguidance reads it, and llama.cpp's GBNF"
_JSON = re.compile(r"%json\s*(?=\{)")
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
_BOUNDS = re.compile(r"Failed to generate regex for \w+ range: (.*)")
_TOO_COMPLEX = re.compile(r"panic|too (large|big|complex|many)|fuel|Current row has")


class ClientGrammars(Grammars):
    """Grammars are those of llguidance, as JSON or Lark, and GBNF."""

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            compiled = self._matcher(as_lark(grammar))
        except RecursionError:
            raise ValueError("the grammar is nested too deeply") from None
        for warning in compiled.get_grammar_warnings():  # of what would be ignored
            raise ValueError(explain(warning))
        first = compiled.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise ValueError(explain(first.get_error(), first=True))
        return compiled

    def _matcher(self, grammar: str) -> LLMatcher:
        try:
            return super()._compile(grammar)
        except ValueError as error:
            raise ValueError(explain(str(error))) from None


def as_lark(grammar: str) -> str:
    """GBNF becomes Lark, all else stays. ValueError for what is neither, or has a number that would be changed."""
    if grammar.lstrip().startswith("{"):  # llguidance's own form
        return _own_form(grammar)
    return _text_as_lark(grammar)


def _text_as_lark(grammar: str) -> str:
    if ":" not in grammar:
        raise ValueError(f"the grammar has no rule; {ACCEPTED}")
    if is_gbnf(grammar):
        return _from_gbnf(grammar)
    _check_embedded(grammar)
    return grammar


def _from_gbnf(grammar: str) -> str:
    try:
        return gbnf_to_lark(plain(grammar))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"the grammar cannot be read: {error}; {ACCEPTED}") from None


def _own_form(grammar: str) -> str:
    """A grammar in llguidance's own form, whose parts may be GBNF too."""
    try:
        whole = json.loads(grammar)
        for part in whole["grammars"]:
            check_numbers(part.get("json_schema"))
            if "lark_grammar" in part:
                part["lark_grammar"] = _text_as_lark(part["lark_grammar"])
    except (TypeError, KeyError, AttributeError):
        raise ValueError("the grammar is not in llguidance's form") from None
    return json.dumps(whole)


def _check_embedded(lark: str) -> None:
    """Check the JSON schemas within a grammar in Lark."""
    for begin in _JSON.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, begin.end())
        except json.JSONDecodeError:  # llguidance says where
            continue
        check_numbers(schema)


def explain(message: str, first: bool = False) -> str:
    """What llguidance says, in the words of an error response. `first`: of the first token."""
    if unknown := _UNKNOWN.search(message):
        return f"the schema uses {unknown[1]}, which this server cannot enforce"
    if "oneOf constraints" in message:
        return "oneOf can be enforced only where no two of its schemas allow the same value; use anyOf"
    if "Unsatisfiable schema" in message:
        return f"the schema cannot be met: {message.partition('Unsatisfiable schema: ')[2]}"
    if "has too many digits" in message:
        return message.partition("\n")[0]
    if bounds := _BOUNDS.search(message):
        return f"the schema cannot be enforced: its bounds {bounds[1]} are too large"
    if first and "NoExtension" in message:
        return "the grammar cannot be met: it allows no text"
    if _TOO_COMPLEX.search(message):
        return "the grammar is too large or too complex"
    return f"{REFUSED}{' '.join(message.removeprefix(REFUSED).split())}"
