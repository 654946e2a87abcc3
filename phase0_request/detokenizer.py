"""Detokenizer: turns output tokens into text while the answer is generated, and ends it at a stop string."""

import codecs
from collections.abc import Iterable
from functools import lru_cache

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer

DEFAULTS = SamplingParams()


class Detokenizer:
    """Incremental detokenization of one request's output.

    A token stands for some bytes, and a character may take several tokens. So the bytes go through an incremental UTF-8
    decoder, which emits whole characters; invalid UTF-8 becomes U+FFFD. The text then goes through a StopScanner, which
    ends it before the first stop string, or after it with `include_stop_str_in_output`. Splitting the tokens into calls
    of `push` differently does not change the text.
    """

    # region exercise 0.6
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams = DEFAULTS) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(params.stop, params.include_stop_str_in_output)
        self._exempt = params.min_tokens  # the text of this many more tokens is not searched for stop strings

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._scanner.matched

    @property
    def held_chars(self) -> int:
        """The number of characters held back because a stop string may begin with them."""
        return len(self._scanner.held())

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens. Returns the text that can be streamed now, which may be empty."""
        return "".join(map(self._push, tokens))

    def flush(self) -> str:
        """End the text. Returns the text held back: an incomplete character, the beginning of a stop string."""
        tail = self._utf8.decode(b"", final=True)
        return self._scanner.push(tail) + self._scanner.held()

    def _push(self, token: int) -> str:
        text = self._utf8.decode(self._tokenizer.token_bytes(token, self._skip_special_tokens))
        if self._exempt:
            self._exempt -= 1
            return text
        return self._scanner.push(text)

    # endregion


class StopScanner:
    """Finds the first stop string in text that arrives bit by bit.

    For each stop string the scanner counts how many of its first characters the text ends with. It holds back the
    longest such ending, which may be the start of a stop string; all text before it is safe to stream. The first stop
    string to complete ends the text, and if several complete on one character, the longest does. `matched` is that stop
    string. It is part of the text only with `include`.
    """

    # region exercise 0.7
    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._progress = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text. Returns the text that is now safe to stream: nothing once a stop string has been found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            for i, (stop, borders) in enumerate(self._stops):
                length = self._progress[i]
                while length and stop[length] != text[end]:
                    length = borders[length - 1]
                if stop[length] == text[end]:
                    length += 1
                self._progress[i] = length
                if length == len(stop) and (self.matched is None or length > len(self.matched)):
                    self.matched = stop
            if self.matched is not None:
                self._held = ""
                return text[: end + 1 - (0 if self._include else len(self.matched))]
        safe = len(text) - max(self._progress)
        self._held = text[safe:]
        return text[:safe]

    def held(self) -> str:
        """The text held back. If no more text comes, it is not a stop string and can be streamed."""
        return self._held

    # endregion


# region exercise 0.7
@lru_cache(64)  # the n completions of a request have the same stop strings
def _borders(stop: str) -> list[int]:
    """borders[i]: length of the longest proper prefix of stop[:i+1] that is also its suffix (Knuth-Morris-Pratt)."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = borders[matched - 1]
        if stop[i] == stop[matched]:
            matched += 1
        borders[i] = matched
    return borders


# endregion


class Transcript:
    """Turns the tokens of one output into text. A stop string in the text also ends the output. The engine sees only
    tokens, so the caller ends the request there. Without a tokenizer there is no text."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop token that ended it
        self.includes_stop = params.include_stop_str_in_output
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, params) if tokenizer is not None else None

    @property
    def has_text(self) -> bool:
        return self._detokenizer is not None

    @property
    def held_chars(self) -> int:
        """The number of characters held back because a stop string may begin with them."""
        return self._detokenizer.held_chars if self._detokenizer is not None else 0

    def add(self, token: int | None, reason: FinishReason | None = None) -> str:
        """Add a token, a finish reason, or both. Returns the text that can be sent now, which is the last if
        `finish_reason` is set. A token that stops an output has no text, unless the stop is part of it."""
        text, detokenizer = "", self._detokenizer
        if reason is FinishReason.STOP and token in self._stop_tokens:
            self.stop_reason = token
        if detokenizer is not None:
            if token is not None and (reason is not FinishReason.STOP or self.includes_stop):
                text = detokenizer.push([token])
            if reason is not None:
                text += detokenizer.flush()
            if detokenizer.stopped is not None:
                self.stop_reason, reason = detokenizer.stopped, FinishReason.STOP
        self.finish_reason = reason
        return text
