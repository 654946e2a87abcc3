"""The bytes of one entry of a vocabulary, by its tokenizer's decoder. A character may span several entries."""

from collections.abc import Iterator, Sequence
from typing import Any

_WORD_START = "\u2581"  # SentencePiece's mark for a space in front of a word
# The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others are U+0100 and on.
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
_BYTES = {chr(b): b for b in _PLAIN} | {chr(0x100 + n): b for n, b in enumerate(_OTHERS)}


def bytes_of(entry: str, decoder: Sequence[dict[str, Any]]) -> bytes:
    """The bytes of one entry of the vocabulary. ValueError if the tokenizer's decoder is not supported."""
    kinds = {step["type"] for step in decoder}
    if "ByteLevel" in kinds:
        return bytes(_BYTES[c] for c in entry) if all(c in _BYTES for c in entry) else entry.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">") and "ByteFallback" in kinds:
            return bytes([int(entry[3:5], 16)])
        return entry.replace(_WORD_START, " ").encode()
    raise ValueError(
        f"this tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}; supported are ByteLevel "
        "(GPT-2, Llama 3, Qwen) and ByteFallback or Metaspace (Llama 2, Mistral)"
    )


def drops_leading_space(decoder: Sequence[dict[str, Any]]) -> bool:
    """Whether decoding a complete text removes the space that SentencePiece put in front of it."""
    return any(
        (step["type"] == "Strip" and step.get("start"))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in decoder
    )


def steps_of(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of the "decoder" of a tokenizer.json, which may be nested sequences."""
    if decoder is not None and decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from steps_of(step)
    elif decoder is not None:
        yield decoder
