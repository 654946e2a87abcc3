"""What bytes a vocabulary entry stands for. Vocabularies are written down in one of two ways; this reads both."""

from collections.abc import Iterator
from functools import cache
from typing import Any

Decoder = dict[str, Any] | None  # the "decoder" of a tokenizer.json

_WORD_START = "\u2581"  # SentencePiece's mark for a space in front of a word


@cache
def byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


def bytes_of_token(piece: str, decoder: Decoder) -> bytes:
    """The bytes of one entry. ValueError if the tokenizer's decoder is of neither kind."""
    kinds = {step["type"] for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        letters = byte_of_letter()
        return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else piece.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") and "ByteFallback" in kinds:
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_WORD_START, " ").encode()
    raise ValueError(
        f"this tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}; supported are ByteLevel "
        "(GPT-2, Llama 3, Qwen) and ByteFallback or Metaspace (Llama 2, Mistral)"
    )


def drops_leading_space(decoder: Decoder) -> bool:
    """SentencePiece puts a space in front of a text before splitting it; decoding a whole text takes it off again."""
    return any(
        (step["type"] == "Strip" and step.get("start")) or (step["type"] == "Metaspace" and _prepends(step))
        for step in _steps(decoder)
    )


def _prepends(step: dict[str, Any]) -> bool:
    return bool(step.get("prepend_scheme", "always") != "never")


def _steps(decoder: Decoder) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
