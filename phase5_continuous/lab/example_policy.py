"""An entry for the capstone: short prompts first, with a head start that is bounded."""

from dataclasses import dataclass

from phase0_request.request import Request
from phase5_continuous.policies import Policy


@dataclass(frozen=True)
class ShortPromptsFirst(Policy):
    """A request counts as having arrived later for each token of its prompt, up to `bound` seconds."""

    seconds_per_token: float = 0.002

    @property
    def bound(self) -> float:
        return 4.0

    def rank(self, request: Request) -> float:
        return request.arrival + min(self.seconds_per_token * len(request.prompt_tokens), self.bound)


def policy() -> ShortPromptsFirst:
    return ShortPromptsFirst()
