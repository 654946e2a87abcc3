"""Detokenizer: tokens in, text out, while the answer is still being written."""

import codecs
from collections.abc import Iterable
from typing import Protocol

from phase0_request.stop import StopScanner


class TokenBytes(Protocol):
    """All that a detokenizer needs of a tokenizer: the bytes of one token. Special tokens have none to show."""

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """The text of one request's output, piece by piece.

    A token is bytes, and a character may take several tokens: so the bytes go through one incremental UTF-8 decoder
    and come out as whole characters. Bytes that are no UTF-8 come out as U+FFFD, as they do when decoded at once.
    Then stop strings: what follows one is dropped, and it is not shown itself. However the tokens are cut into
    pushes, the pieces joined are the same text.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stop)
        self._exempt = min_tokens  # the text of so many more tokens is not searched for stop strings

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None while there is none."""
        return self._scanner.matched

    @property
    def held(self) -> int:
        """How many whole characters are held back, because a stop string may begin with them."""
        return len(self._scanner.held())

    def push(self, tokens: Iterable[int]) -> str:
        """More tokens. Returns the text that can be shown now; it may be empty."""
        return "".join(map(self._push, tokens))

    def flush(self) -> str:
        """No more tokens will come. Returns what was held back: half a character, the start of a stop string."""
        tail = self._utf8.decode(b"", final=True)
        return self._scanner.push(tail) + self._scanner.held()

    def _push(self, token: int) -> str:
        try:
            content = self._tokenizer.token_bytes(token)
        except ValueError:  # a padded id: models may have more rows than their tokenizers have tokens
            content = b""
        text = self._utf8.decode(content)
        if self._exempt:
            self._exempt -= 1
            return text
        return self._scanner.push(text)
