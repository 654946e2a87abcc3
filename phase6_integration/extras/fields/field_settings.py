"""The setting of fields: how many log-probabilities a request may ask for."""

from dataclasses import dataclass
from functools import partial

from phase0_request.params import MAX_LOGPROBS
from phase0_request.support.checks import check_int
from phase0_request.support.options import check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSettings:
    max_logprobs: int = option(
        MAX_LOGPROBS, "most alternatives per token", check=partial(check_int, low=0, high=MAX_LOGPROBS)
    )

    def __post_init__(self) -> None:
        check_fields(self)
