"""An entry for the capstone: short prompts first, with a head start that is bounded."""

from collections.abc import Sequence
from dataclasses import dataclass

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache


@dataclass(frozen=True)
class ShortPromptsFirst:
    """A request counts as having arrived later for each token of its prompt, up to `bound` seconds."""

    seconds_per_token: float = 0.002
    bound: float = 4.0

    def rank(self, request: Request) -> float:
        return request.arrival + min(self.seconds_per_token * len(request.prompt_tokens), self.bound)

    def order(self, first: Sequence[Request], cache: PagedCache) -> Sequence[Request]:
        return first


def policy() -> ShortPromptsFirst:
    return ShortPromptsFirst()
