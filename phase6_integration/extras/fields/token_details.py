"""TokenDetails: what the engine's process reports of one output beside its tokens, as the HTTP process keeps it.

A `Report` comes with a token, of requests that ask for it or have drafts: logprobs, an embedding, how drafts did.
"""

import math
from array import array
from collections.abc import Iterable, Iterator

import msgspec

from phase0_request.params import TokenLogprobs
from phase6_integration.process.outputs import Output


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What is said of a token."""

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token, if they were asked for
    accepted: int = 0  # tokens of drafts so far
    rejected: int = 0
    embedding: bytes | None = None  # float32, if it was asked for


_decoder = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.Encoder().encode


class LogprobArrays:
    """The logprobs of consecutive tokens, in arrays: 12 bytes for an alternative, which as objects takes 110."""

    __slots__ = ("_alternatives", "_counts", "_logprobs", "_top")

    def __init__(self, logprobs: Iterable[TokenLogprobs | None] = ()) -> None:
        self._logprobs = array("d")  # of each token
        self._counts = array("B")  # of each token, the number of its alternatives
        self._alternatives = array("i")  # of all tokens, one after the other
        self._top = array("d")  # their logprobs
        for logprob in logprobs:
            self.append(logprob)

    def __len__(self) -> int:
        return len(self._logprobs)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        stop = 0
        for logprob, count in zip(self._logprobs, self._counts, strict=True):
            start, stop = stop, stop + count
            top = tuple(zip(self._alternatives[start:stop], self._top[start:stop], strict=True))
            yield None if math.isnan(logprob) else TokenLogprobs(logprob, top)

    def append(self, logprobs: TokenLogprobs | None) -> None:
        """Add those of a token; None for the first of a prompt, which has none."""
        chosen, top = logprobs or TokenLogprobs(math.nan, ())
        self._logprobs.append(chosen)
        self._counts.append(len(top))
        for token, logprob in top:
            self._alternatives.append(token)
            self._top.append(logprob)

    def extend(self, later: "LogprobArrays") -> None:
        for name in self.__slots__:
            getattr(self, name).extend(getattr(later, name))

    def split(self, count: int) -> "LogprobArrays":
        """Remove the first `count` tokens and return them."""
        first, alternatives = LogprobArrays(), sum(self._counts[:count])
        for name in self.__slots__:
            stop = count if name in ("_logprobs", "_counts") else alternatives
            setattr(first, name, getattr(self, name)[:stop])
            del getattr(self, name)[:stop]
        return first


class TokenDetails:
    """What is known about the tokens of one output."""

    def __init__(self) -> None:
        self.prompt_logprobs: LogprobArrays | None = None  # of all but the first prompt token
        self.embedding: bytes | None = None
        self.accepted = self.rejected = 0  # tokens of drafts
        self._logprobs = LogprobArrays()  # of the tokens that are not written yet

    def add(self, more: bytes) -> None:
        report = _decoder.decode(more)
        self.accepted, self.rejected, self.embedding = report.accepted, report.rejected, report.embedding
        if report.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobArrays(report.prompt_logprobs)
        if report.logprobs is not None:
            self._logprobs.append(report.logprobs)

    def take(self, count: int) -> LogprobArrays:
        """Those of the next tokens, which are about to be written."""
        return self._logprobs.split(count)


def details_of(output: Output) -> TokenDetails:
    """What is known about an output so far."""
    if output.details is None:
        output.details = TokenDetails()
    assert isinstance(output.details, TokenDetails)
    return output.details
