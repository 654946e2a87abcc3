"""Grammars of the output, as llguidance follows them: one vocabulary and one set of limits, for the process that checks
a grammar and for the engine that obeys it.
"""

import json
from collections.abc import Iterable

from llguidance import LLParserLimits, LLTokenizer

from phase0_request.tokenizer import Tokenizer

# llguidance's defaults let one mask take 2.5 s, and one lexer 120 MB. By these, the worst grammars known take 0.5 s to
# compile, 0.2 s for a mask, and 10 MB; common ones, less than 10 ms and 1 ms. An object may have about 450 properties
# that are optional, and any number that are required. A request beyond the limits ends with an error.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=65_000,  # symbols, which llguidance counts in 16 bits
    verbose_errors=False,
)


def vocabulary(tokenizer: Tokenizer, size: int | None = None, eos_ids: Iterable[int] | None = None) -> LLTokenizer:
    """The vocabulary in llguidance's form. Takes a second for a large one. ValueError if llguidance cannot read it.
    `size` is the number of rows of the embedding, including those without a token."""
    ends = sorted(tokenizer.eos_ids if eos_ids is None else eos_ids)
    return LLTokenizer(_without_names(tokenizer.to_json()), n_vocab=size, eos_token=ends or None)


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
