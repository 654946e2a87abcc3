"""TokenSet: a set of token ids as a bitmap. All 152,000 ids of a large vocabulary take 19 kB; as a tuple, 5 MB."""

from collections.abc import Sequence
from dataclasses import dataclass

from phase0_request.checks import invalid

MAX_ID = (1 << 24) - 1  # beyond the largest vocabulary; a bitmap up to it is 2 MB
WORD = 4  # bytes that the size is a multiple of, so that masks of 32-bit words can be made of it in place
_DIGITS = bytes.maketrans(b"\0\1", b"01")


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Token t is bit t % 8 of byte t // 8. Immutable: the n completions of a request share one."""

    bits: bytes

    @classmethod
    def of(cls, name: str, tokens: "TokenSet | Sequence[int]") -> "TokenSet":
        """The set of these ids, checked; `name` is for errors. A set is returned as it is."""
        if isinstance(tokens, TokenSet):
            return tokens
        allowed = f"a list of at least one token id from 0 to {MAX_ID}"
        if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence) or not tokens:
            raise invalid(name, allowed, tokens)
        if {*map(type, tokens)} != {int} or min(tokens) < 0 or (highest := max(tokens)) > MAX_ID:
            wrong = (token for token in tokens if type(token) is not int or not 0 <= token <= MAX_ID)
            raise invalid(name, allowed, next(wrong))
        flags = bytearray(highest + 1)
        for token in tokens:
            flags[token] = 1
        bits = int(flags.translate(_DIGITS)[::-1], 2)
        return cls(bits.to_bytes(-(-len(flags) // (8 * WORD)) * WORD, "little"))

    @property
    def highest(self) -> int:
        """The highest id; -1 if the set is empty."""
        return int.from_bytes(self.bits, "little").bit_length() - 1
