"""bad_words: from words to the sequences of tokens that are never completed."""

from collections.abc import Sequence

from phase0_request.params import MAX_STOP_LENGTH
from phase6_integration.server.errors import conflict
from phase6_integration.server.tokenization import TokenizerPool


async def bad_words(pool: TokenizerPool, words: Sequence[str], tenant: str) -> list[tuple[int, ...]]:
    """Each word in two forms: at the start of a text, and after a space, where it mostly is another token."""
    if not words:
        return []
    texts = [form for word in words for form in _forms(word)]
    found = dict.fromkeys(await pool.encode(texts, tenant, add_special_tokens=False))
    if not all(1 <= len(tokens) <= MAX_STOP_LENGTH for tokens in found):
        raise conflict("bad_words", f"each of bad_words must be 1 to {MAX_STOP_LENGTH} tokens of this model")
    return list(found)


def _forms(word: str) -> tuple[str, ...]:
    bare = word.lstrip(" ")
    return (bare, f" {bare}") if bare else (word,)
