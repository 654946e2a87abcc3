"""How likely a model found a token."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Of one token, and what the model found likeliest in its place: natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first
