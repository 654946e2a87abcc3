"""An answer on its way through the front: tokens in as the engine says them, text out as a client can be shown it."""

from dataclasses import dataclass

from phase0_request.detokenizer import Detokenizer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, RequestTimes, TokenLogprobs
from phase0_request.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, to be answered once."""

    id: str  # unique among those that live
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None  # seconds from now; None: the engine's own


@dataclass(frozen=True, slots=True)
class Delta:
    """What one answer has gained. It is empty only if it is the answer's last."""

    index: int  # which ask of the reply
    text: str
    tokens: tuple[int, ...] = ()  # those whose text this is; what ended the answer is not among them
    offsets: tuple[int, ...] = ()  # where in the answer's text each begins, in characters
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    finish_reason: FinishReason | None = None  # on the last one
    error: str | None = None  # why it is an error; for the log, not for the client


@dataclass(slots=True)
class AnswerTimes(RequestTimes):
    """Seconds, on the clock of the machine. `tokens` are from when the step of each had ended."""

    @property
    def queue(self) -> float | None:
        return self.queue_time

    @property
    def prefill(self) -> float | None:
        """From the first admission to the first token."""
        return self.tokens[0] - self.admitted if self.tokens and self.admitted is not None else None

    @property
    def decode(self) -> float | None:
        """From the first token to the last."""
        return self.tokens[-1] - self.tokens[0] if self.tokens else None


@dataclass(slots=True)
class AnswerState:
    """What is known of an answer, at any time."""

    times: AnswerTimes
    cached_tokens: int = 0  # of its prompt, known once it is admitted
    generated: int = 0  # tokens, with the one that ended it
    prompt_logprobs: list[TokenLogprobs] | None = None  # if asked for: of all but the first, there with the first token
    stop_reason: str | int | None = None  # the stop string or the stop token that ended it


@dataclass(slots=True)
class _Token:
    """A token whose text is not all shown yet."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


class _Texts:
    """What tokens stand for. Models have more rows than their tokenizers have tokens: one of those has no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except ValueError:
            return b""


class Answer:
    """Text comes out once it is whole characters in which no stop string can begin, and tokens come with their text."""

    def __init__(self, index: int, ask: Ask, arrival: float, tokenizer: Tokenizer | None) -> None:
        params = ask.params
        self.ask = ask
        self.index = index
        self.state = AnswerState(AnswerTimes(arrival))
        self.reason: FinishReason | None = None  # why it ended, once its client has been told
        self._detokenizer = Detokenizer(_Texts(tokenizer), params.stop, params.min_tokens) if tokenizer else None
        self._shown = 0  # characters
        self._held: list[_Token] = []
        self._stops = frozenset(params.stop_token_ids)

    @property
    def done(self) -> bool:
        return self.reason is not None

    def take(self, token: int, logprobs: TokenLogprobs | None, reason: FinishReason | None, at: float) -> Delta | None:
        """One more token, with the reason if it is the last. None if there is nothing to show yet."""
        state = self.state
        state.generated += 1
        state.times.tokens.append(at)
        if reason is FinishReason.STOP:  # what ends an answer is no part of it
            if token in self._stops:
                state.stop_reason = token
            return self.end(reason)
        text = ""
        if self._detokenizer is None:
            self._held.append(_Token(token, 0, logprobs))
        else:
            self._held.append(_Token(token, self._shown + self._detokenizer.held, logprobs))
            text = self._detokenizer.push([token])
            if self._detokenizer.stopped is not None:
                state.stop_reason = self._detokenizer.stopped
                reason = FinishReason.STOP
        if reason is not None:
            return self.end(reason, text=text)
        return self._show(text) if text or self._detokenizer is None else None

    def end(self, reason: FinishReason, error: str | None = None, text: str = "") -> Delta:
        """The last delta, with what was held back. Of the tokens of a stop string none comes out that lies behind the
        text."""
        self.reason = reason
        if self._detokenizer is not None:
            text += self._detokenizer.flush()
        stopped = self._detokenizer is not None and self._detokenizer.stopped is not None
        return self._show(text, reason, error, everything=not stopped)

    def _show(
        self, text: str, reason: FinishReason | None = None, error: str | None = None, everything: bool = False
    ) -> Delta:
        self._shown += len(text)
        # region exercise 6.2
        held = self._held
        if everything or self._detokenizer is None:
            shown = len(held)
        else:
            shown = next((i for i, token in enumerate(held) if token.offset >= self._shown), len(held))
        out, self._held = held[:shown], held[shown:]
        # endregion
        return Delta(
            self.index,
            text,
            tuple(token.id for token in out),
            tuple(token.offset for token in out),
            tuple(token.logprobs for token in out if token.logprobs is not None),
            reason,
            error,
        )
