"""What a step tells the outside: a token, which may be the end. And when a token is the end."""

from collections.abc import Collection
from typing import NamedTuple

from phase0_request.logprobs import TokenLogprobs
from phase0_request.request import FinishReason, Request


class Event(NamedTuple):
    """Delivered once each, in order, and none after one that carries a finish reason.

    It has a token, or a reason, or both. A request that ends between two tokens, by an error say, ends without one.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


def reason_to_finish(request: Request, eos_ids: Collection[int]) -> FinishReason | None:
    """Whether the newest output token ends the request. None of its first `min_tokens` stops it, and a stop wins over
    a length reached by the same token."""
    # region exercise 0.2
    params = request.params
    token = request.output_tokens[-1]
    if len(request.output_tokens) > params.min_tokens and (
        token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos)
    ):
        return FinishReason.STOP
    if len(request.output_tokens) >= params.max_tokens:
        return FinishReason.LENGTH
    return None
    # endregion
