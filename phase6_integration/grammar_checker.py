"""GrammarChecker: parses a grammar and steps through one output of it, to find out that both are possible and fast.

It runs in a tokenizer process, and relies on the limits of time and memory there.
"""

import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from phase0_request.grammar import LIMITS, vocabulary
from phase0_request.tokenizer import Tokenizer

FOLLOWED = 16  # tokens that are tried: a grammar that is too large may be so only after the first
ACCEPTED = "accepted are Lark, as llguidance reads it, and llama.cpp's GBNF"
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
_TOO_COMPLEX = re.compile(r"panic|too (large|big|complex|many)|fuel|Current row has")


class GrammarChecker:
    """For one tokenizer. Grammars are those of llguidance, as JSON or Lark, and GBNF."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = vocabulary(tokenizer)

    def __call__(self, grammar: str) -> str:
        """The grammar as llguidance reads it. A ValueError says what is wrong with it."""
        grammar = as_lark(grammar)
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
    """GBNF becomes Lark; all else stays as it is."""
    if grammar.startswith("{"):  # llguidance's own form
        return grammar
    try:
        return any_to_lark(grammar)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"the grammar cannot be read: {error}; {ACCEPTED}") from None


def explain(message: str, first: bool = False) -> str:
    """What llguidance says, in the words of an error response. `first`: of the first token."""
    if unknown := _UNKNOWN.search(message):
        return f"the schema uses {unknown[1]}, which this server cannot enforce"
    if "oneOf constraints" in message:
        return "oneOf can be enforced only where no two of its schemas allow the same value; use anyOf"
    if "Unsatisfiable schema" in message:
        return f"the schema cannot be met: {message.partition(': ')[2]}"
    if first and "NoExtension" in message:
        return "the grammar cannot be met: it allows no text"
    if _TOO_COMPLEX.search(message):
        return "the grammar is too large or too complex"
    return f"the grammar cannot be used: {' '.join(message.split())}"
