"""Transcript: the text of one output while it is generated, and how it ends."""

from phase0_request.detokenizer import Detokenizer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer


class Transcript:
    """Turns the tokens of one output into text. A stop string in the text ends the output too, and only the text shows
    it: the engine, which knows tokens, has to be told. Without a tokenizer there is no text."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.finish_reason: FinishReason | None = None
        self.detokenizer = Detokenizer(tokenizer, params) if tokenizer is not None else None
        self._includes_stop = params.include_stop_str_in_output

    def add(self, token: int | None, reason: FinishReason | None = None) -> str:
        """Add a token, a finish reason, or both. Returns the text that can be sent now, which is the last if
        `finish_reason` is set. A token that stops an output has no text, unless the stop is part of it."""
        text, detokenizer = "", self.detokenizer
        if detokenizer is not None:
            if token is not None and (reason is not FinishReason.STOP or self._includes_stop):
                text = detokenizer.push([token])
            if reason is not None:
                text += detokenizer.flush()
            if detokenizer.stopped is not None:
                reason = FinishReason.STOP
        self.finish_reason = reason
        return text
