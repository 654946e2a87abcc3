"""Transcript: the text of one output while it is generated, and how it ends. In process and in the server."""

from phase0_request.detokenizer import Detokenizer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer


class Transcript:
    """Turns the tokens of one output into text. A stop string in the text ends the output too, and only the text shows
    it: the engine, which knows tokens, has to be told. Without a tokenizer there is no text."""

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
    def held(self) -> int:
        """The number of characters held back because a stop string may begin with them."""
        return self._detokenizer.held if self._detokenizer is not None else 0

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
