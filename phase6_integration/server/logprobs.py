"""Logprobs as clients get them: tokens by name, with their bytes, and where in the text they begin."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from phase0_request.request import TokenLogprobs
from phase0_request.tokenizer import Tokenizer

LOWEST = -9999.0  # what minus infinity is called in JSON, which has no word for it


class Name(NamedTuple):
    text: str
    bytes: list[int] | None  # None: a special token, which stands for none


class Names:
    """What each token is called: its text; a special token's own name; `bytes:` and hexadecimals if it is no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, Name] = {}

    def __getitem__(self, token: int) -> Name:
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._find(token)
        return name

    def _find(self, token: int) -> Name:
        unnamed = Name(f"token_id:{token}", None)
        if self._tokenizer is None:
            return unnamed
        try:
            content = self._tokenizer.token_bytes(token)
        except ValueError:  # a hole in the vocabulary: models have more rows than their tokenizers have tokens
            return unnamed
        if not content:
            return Name(special_name(self._tokenizer, token), None)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return Name(text, list(content))


def special_name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.name(token) or f"token_id:{token}"


def for_chat(names: Names, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """An entry a token, each with its likeliest alternatives."""
    return [
        {**_entry(names, token, one.logprob), "top_logprobs": [_entry(names, *other) for other in one.top]}
        for token, one in zip(tokens, found, strict=True)
    ]


def for_completion(
    names: Names, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """Parallel arrays. A token is always among its own alternatives; the first of a prompt has neither."""
    return {
        "tokens": [names[token].text for token in tokens],
        "token_logprobs": [one and _number(one.logprob) for one in found],
        "top_logprobs": [one and _alternatives(names, token, one) for token, one in zip(tokens, found, strict=True)],
        "text_offset": list(offsets),
    }


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Where in the text of a prompt each of its tokens begins, in characters."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    first = tokenizer.token_bytes(tokens[0])
    at = -1 if first.startswith(b" ") and not text.startswith(" ") else 0  # a space that is put in front of a text
    offsets = []
    for token in tokens:
        offsets.append(min(max(at, 0), len(text)))
        content = tokenizer.token_bytes(token)
        if content:
            at += len(utf8.decode(content))
        elif text.startswith(name := special_name(tokenizer, token), max(at, 0)):  # it was written out in the prompt
            at = max(at, 0) + len(name)
    return offsets


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)


def _entry(names: Names, token: int, logprob: float) -> dict[str, Any]:
    name = names[token]
    return {"token": name.text, "logprob": _number(logprob), "bytes": name.bytes}


def _alternatives(names: Names, token: int, one: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for other, logprob in (*one.top, (token, one.logprob)):
        found.setdefault(names[other].text, _number(logprob))  # of two tokens with one text the likelier is named
    return found
