"""Logprobs in OpenAI's two formats: token texts, their bytes, and their offsets in the text."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from phase0_request.params import TokenLogprobs
from phase0_request.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot express


class Name(NamedTuple):
    text: str
    bytes: list[int] | None  # None: a special token


class TokenNames:
    """The name of each token: its text, the name of a special token, or `bytes:` and hex codes if it is not UTF-8."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, Name] = {}

    def __getitem__(self, token: int) -> Name:
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._find(token)
        return name

    def _find(self, token: int) -> Name:
        if self._tokenizer is None:
            return Name(f"token_id:{token}", None)
        content = self._tokenizer.token_bytes(token)
        if not content:
            return Name(special_name(self._tokenizer, token), None)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return Name(text, list(content))


def special_name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.name(token) or f"token_id:{token}"


def for_chat(
    names: TokenNames, tokens: Iterable[int], found: Iterable[TokenLogprobs | None]
) -> Iterator[dict[str, Any]]:
    """One entry per token, with its top alternatives."""
    for token, one in zip(tokens, found, strict=True):
        assert one is not None  # only the first token of a prompt has none, which chats do not echo
        yield {**_entry(names, token, one.logprob), "top_logprobs": [_entry(names, *other) for other in one.top]}


def for_completion(
    names: TokenNames, tokens: Sequence[int], found: Iterable[TokenLogprobs | None], offsets: Iterable[int], most: int
) -> dict[str, Iterator[Any]]:
    """Parallel arrays. Each token is among its own alternatives, beside at most `most` others; the first token of a
    prompt has no logprob."""
    return {
        "tokens": (names[token].text for token in tokens),
        "token_logprobs": (one and _number(one.logprob) for one in found),
        "top_logprobs": (
            one and _alternatives(names, token, one, most) for token, one in zip(tokens, found, strict=True)
        ),
        "text_offset": iter(offsets),
    }


def for_prompt(
    names: TokenNames, tokens: Sequence[int], found: Iterable[TokenLogprobs | None], most: int
) -> Iterator[dict[str, Any] | None]:
    """`prompt_logprobs`: one object per token, which has the token and at most `most` alternatives by their ids. The
    first token has none. The rank of a token outside the alternatives is not known."""
    yield None
    for token, one in zip(tokens[1:], found, strict=True):
        assert one is not None
        ranks = {other: rank for rank, (other, _) in enumerate(one.top, 1)}
        logprobs = {token: one.logprob} | dict(one.top[:most])
        yield {
            str(other): {"logprob": _number(value), "rank": ranks.get(other), "decoded_token": names[other].text}
            for other, value in logprobs.items()
        }


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """The offset of each prompt token in the text of the prompt, in characters."""
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


def _entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    name = names[token]
    return {"token": name.text, "logprob": _number(logprob), "bytes": name.bytes}


def _alternatives(names: TokenNames, token: int, one: TokenLogprobs, most: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for other, logprob in (*one.top[:most], (token, one.logprob)):
        found.setdefault(names[other].text, _number(logprob))  # of two tokens with the same text, the likelier counts
    return found
