"""GrammarChecker: parses a grammar and steps through one output of it, to find out that both are possible and fast.

It runs in a tokenizer process, and relies on the limits of time and memory there.
"""

import contextlib
import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from phase0_request.grammar import LIMITS, vocabulary
from phase0_request.params import MAX_GRAMMAR
from phase0_request.tokenizer import Tokenizer
from phase6_integration.wings.structured.gbnf import is_gbnf, plain
from phase6_integration.wings.structured.schema_literals import LONG, with_literals

FOLLOWED = 16  # tokens that are tried: a grammar that is too large may be so only after the first
ACCEPTED = "accepted are Lark, as llguidance reads it, and llama.cpp's GBNF"
_JSON = re.compile(r"%json\s*(?=\{)")
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
_BOUNDS = re.compile(r"Failed to generate regex for \w+ range: (.*)")
_TOO_COMPLEX = re.compile(r"panic|too (large|big|complex|many)|fuel|Current row has")


class GrammarChecker:
    """For one tokenizer. Grammars are those of llguidance, as JSON or Lark, and GBNF."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = vocabulary(tokenizer)

    def __call__(self, grammar: str) -> str:
        """The grammar as llguidance reads it. A ValueError says what is wrong with it."""
        grammar = as_lark(grammar)
        if len(grammar) > MAX_GRAMMAR:
            raise ValueError("the grammar is too large")
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary, limits=LIMITS)
        if failed or messages:  # a warning tells of what would be ignored
            raise ValueError(explain(messages[0]))
        self._follow(LLMatcher(self._vocabulary, grammar, limits=LIMITS, log_level=0))
        return grammar

    def _follow(self, matcher: LLMatcher) -> None:
        """Follow one text that the grammar allows. ValueError if there is none, or following it takes too much."""
        for number in range(FOLLOWED + 1):
            mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not mask:
                raise ValueError(explain(matcher.get_error(), first=number == 0))
            if matcher.is_stopped():
                return
            matcher.consume_token(mask.bit_length() - 1)


def as_lark(grammar: str) -> str:
    """GBNF becomes Lark, and so does a JSON schema with numbers that llguidance would change; all else stays."""
    try:
        if grammar.lstrip().startswith("{"):  # llguidance's own form
            return _with_literals(grammar) if LONG.search(grammar) else grammar
        if ":" not in grammar:
            raise ValueError(f"the grammar has no rule; {ACCEPTED}")
        if is_gbnf(grammar):
            return _from_gbnf(grammar)
        if LONG.search(grammar):
            _check_json(grammar)
        return grammar
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None


def _from_gbnf(grammar: str) -> str:
    try:
        return gbnf_to_lark(plain(grammar))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"the grammar cannot be read: {error}; {ACCEPTED}") from None


def _with_literals(grammar: str) -> str:
    """A grammar in llguidance's own form, with each such schema in Lark."""
    try:
        whole = json.loads(grammar)
        for part in whole["grammars"]:
            _check_json(part.get("lark_grammar", ""))
            lark = with_literals(part["json_schema"]) if "json_schema" in part else None
            if lark is not None:
                del part["json_schema"]
                part["lark_grammar"] = lark
        return json.dumps(whole)
    except (TypeError, KeyError, AttributeError):
        raise ValueError("the schema, or a part of it, is none") from None


def _check_json(lark: str) -> None:
    """ValueError if a grammar in Lark has such a schema: it may have that number as text instead."""
    for begin in _JSON.finditer(lark):
        with contextlib.suppress(json.JSONDecodeError):  # llguidance says where
            schema = json.JSONDecoder().raw_decode(lark, begin.end())[0]
            if isinstance(schema, dict) and with_literals(schema) is not None:
                raise ValueError("a number in const or enum of %json has too many digits: write it as a text in Lark")


def explain(message: str, first: bool = False) -> str:
    """What llguidance says, in the words of an error response. `first`: of the first token."""
    if unknown := _UNKNOWN.search(message):
        return f"the schema uses {unknown[1]}, which this server cannot enforce"
    if "oneOf constraints" in message:
        return "oneOf can be enforced only where no two of its schemas allow the same value; use anyOf"
    if "Unsatisfiable schema" in message:
        return f"the schema cannot be met: {message.partition(': ')[2]}"
    if "has too many digits" in message:
        return message.partition("\n")[0]
    if bounds := _BOUNDS.search(message):
        return f"the schema cannot be enforced: its bounds {bounds[1]} are too large"
    if first and "NoExtension" in message:
        return "the grammar cannot be met: it allows no text"
    if _TOO_COMPLEX.search(message):
        return "the grammar is too large or too complex"
    return f"the grammar cannot be used: {' '.join(message.split())}"
