"""Grammars of the output, as llguidance follows them: one vocabulary and one set of limits, for the process that checks
a grammar and for the engine that obeys it.
"""

from collections.abc import Iterable

from llguidance import LLParserLimits, LLTokenizer

from phase0_request.tokenizer import Tokenizer

# llguidance's defaults let one mask take 2.5 s. By these, the worst grammars known take 0.4 s to compile and 0.35 s for
# a mask; common ones, less than 10 ms and 1 ms. A request beyond them ends with an error.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_grammar_size=65_000,  # symbols, which llguidance counts in 16 bits
    verbose_errors=False,
)


def vocabulary(tokenizer: Tokenizer, size: int | None = None, eos_ids: Iterable[int] | None = None) -> LLTokenizer:
    """The tokens as llguidance needs them: a second's work for a large vocabulary. ValueError if it cannot read them.
    `size`: with the rows of the embedding that have no token."""
    ends = sorted(tokenizer.eos_ids if eos_ids is None else eos_ids)
    return LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=ends or None)
