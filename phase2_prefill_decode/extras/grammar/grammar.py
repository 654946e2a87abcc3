"""Grammars of outputs, compiled by llguidance: for the process that checks a grammar, and for the engine that obeys
it. llguidance is imported at the first grammar; everything else works without it."""

import json
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from phase0_request.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 16  # compiled grammars

# llguidance's defaults let one mask take 2.5 s, and one lexer 120 MB. By these, the worst grammars known take 0.5 s to
# compile, 0.2 s for a mask, and 10 MB; common ones, less than 10 ms and 1 ms. An object may have about 450 properties
# that are optional, and any number that are required. A request beyond the limits ends with an error.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 65_000,  # symbols, which llguidance counts in 16 bits
    "verbose_errors": False,
}


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`vocab_size` is the number of rows of the embedding, including those without a token."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiled = lru_cache(KEPT)(self._compile)

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokens as llguidance needs them. The first grammar computes them, in a second for a large vocabulary.
        ValueError if llguidance cannot read them."""
        from llguidance import LLTokenizer

        tokens = _without_names(self._tokenizer.to_json())
        return LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=self._eos_ids or None)

    def compile(self, grammar: str) -> "LLMatcher":
        """A matcher at the beginning of a grammar. ValueError if the grammar is invalid."""
        return self._compiled(grammar).deep_copy()

    def forget(self) -> None:
        """Compile grammars again when they are next needed. Copies share what llguidance has found out about a
        grammar so far; if that has reached its limit, all copies fail."""
        self._compiled.cache_clear()

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        compiled = LLMatcher(self.vocabulary, grammar, limits=limits, log_level=0)
        if compiled.is_error():
            raise ValueError(f"the grammar cannot be used: {compiled.get_error()}")
        return compiled


def _without_names(described: str) -> str:
    """Rename the control tokens of a tokenizer.json so that no text spells one: in forced text it would become that
    token, and no grammar could allow it as text. A grammar names a control token by its id."""
    tokenizer = json.loads(described)
    model, names = tokenizer["model"], dict[str, str]()
    for token in tokenizer["added_tokens"]:
        if token["special"] and token["content"] != model.get("unk_token"):
            names[token["content"]] = token["content"] = f"\U0010ffff{token['id']}"
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): id for name, id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    return json.dumps(tokenizer)
