"""Stands in for the `tokenizers` library where there is none: in a browser's tab. Phase 0's Tokenizer runs over it.

Byte-level BPE as in tiny_chat's tokenizer.json: a text is split by a pattern, the UTF-8 bytes of each piece become
letters, and of all neighbours the pair that was learned first is merged, again and again.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

BPE = AddedToken = Regex = decoders = normalizers = pre_tokenizers = processors = None  # of GGUF, which no tab reads
if __name__ == "tokenizers":
    sys.modules["tokenizers.models"] = sys.modules[__name__]

PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that are their own letters
LETTERS = {byte: chr(byte) for byte in PLAIN}
LETTERS |= {byte: chr(0x100 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in PLAIN)}
BYTES = {letter: byte for byte, letter in LETTERS.items()}
NEVER = "\U0010ffff"  # in a class that no character of the text is in


class Special(NamedTuple):
    content: str
    special: bool


class Encoding(NamedTuple):
    ids: list[int]


class Tokenizer:
    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described
        self._vocabulary: dict[str, int] = described["model"]["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(described["model"]["merges"])}
        self._added = {each["content"]: each for each in described["added_tokens"]}
        self._names = {number: token for token, number in self.get_vocab().items()}
        split = described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        self._pattern = split.replace(r"|\p{N}|", r"|[\p{N}]|")  # a class of its own, as the others are
        self.encode_special_tokens = False
        self._merged = lru_cache(maxsize=65536)(self._merge)

    @classmethod
    def from_file(cls, file: str) -> Tokenizer:
        return cls.from_str(Path(file).read_text("utf-8"))

    @classmethod
    def from_str(cls, text: str) -> Tokenizer:
        return cls(json.loads(text))

    def to_str(self) -> str:
        return json.dumps(self._described)

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def get_added_tokens_decoder(self) -> dict[int, Special]:
        return {each["id"]: Special(each["content"], each["special"]) for each in self._added.values()}

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._vocabulary | {name: each["id"] for name, each in self._added.items()}

    def id_to_token(self, number: int) -> str | None:
        return self._names.get(number)

    def token_to_id(self, token: str) -> int | None:
        return self._added[token]["id"] if token in self._added else self._vocabulary.get(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        return Encoding([token for part in self._parts(text) for token in self._encoded(part)])

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        names = (self._names.get(token, "") for token in tokens)
        kept = (name for name in names if not (skip_special_tokens and name in self._added))
        data = (name.encode() if name in self._added else bytes(BYTES[letter] for letter in name) for name in kept)
        return b"".join(data).decode("utf-8", "replace")

    def _parts(self, text: str) -> list[str]:
        """Text, and names of added tokens in it, which are every second part."""
        if self.encode_special_tokens:
            return [text]
        names = sorted(self._added, key=len, reverse=True)
        return re.split(f"({'|'.join(map(re.escape, names))})", text)

    def _encoded(self, part: str) -> Iterator[int]:
        if part in self._added and not self.encode_special_tokens:
            yield self._added[part]["id"]
        elif part:
            for piece in re.findall(classes(self._pattern, part), part):
                yield from self._merged(piece)

    def _merge(self, piece: str) -> tuple[int, ...]:
        letters = [LETTERS[byte] for byte in piece.encode()]
        while len(letters) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(letters)]
            first = min(ranks)
            if first == len(self._ranks):
                break
            at = ranks.index(first)
            letters[at : at + 2] = [letters[at] + letters[at + 1]]
        return tuple(self._vocabulary[entry] for entry in letters)


def classes(pattern: str, text: str) -> str:
    r"""A pattern for `re`, which has no \p{L}: the characters of the text that are in such a class stand for it."""

    def members(match: re.Match[str]) -> str:
        return NEVER + "".join(re.escape(c) for c in sorted(set(text)) if unicodedata.category(c)[0] == match[1])

    return re.sub(r"\\p\{(\w)\}", members, pattern)
