"""Budget: bounds the memory that request bodies and unsent answers take together.

A body takes its own size while it arrives. An answer takes, before any work is done for it, the most that it can need:
`answer_bytes`. What does not fit now is a 503 with a time to try again; what can never fit is a 400.
"""

from collections.abc import Sequence

from phase6_integration.messages import EngineRequest
from phase6_integration.server.errors import bad_value, overloaded

BODIES = 4  # request bodies may take one part in so many
SMALL = 16 << 10  # bytes of a body that are free: large bodies on stalled connections cannot lock out small requests

# The most bytes that an answer takes in this process; measured by a test.
REQUEST = 8 << 10  # for each completion
PROMPT = 96  # for each token of a prompt: its id, and for echo its offset
TOKEN = 24  # for each output token: its id, offset and time. Its text is covered as it comes
LOGPROBS = 20  # for the logprob of a token, and as much for each alternative


class Budget:
    """So many bytes, from which leases are taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def lease(self, size: int = 0) -> "Lease":
        lease = Lease(self)
        lease.cover(size)
        return lease


class Lease:
    """Bytes of a budget, held until the end of a `with`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def cover(self, size: int) -> None:
        """Hold at least so many bytes. A RequestError if the budget has not as many left."""
        more = max(size - self.size, 0)
        if self._budget.used + more > self._budget.limit:
            raise overloaded()
        self.size += more
        self._budget.used += more

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.used -= self.size
        self.size = 0


def body_budget(limit: int) -> Budget:
    return Budget(limit // BODIES)


def answer_budget(limit: int) -> Budget:
    return Budget(limit - limit // BODIES)


def answer_bytes(requests: Sequence[EngineRequest]) -> int:
    """The most bytes that the answer to these requests takes. A prompt that is completed n times is there once."""
    prompts = {id(request.prompt): len(request.prompt) for request in requests}
    return PROMPT * sum(prompts.values()) + sum(map(_completion_bytes, requests))


def _completion_bytes(request: EngineRequest) -> int:
    params = request.params
    scored = 0 if params.logprobs is None else params.max_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        scored += len(request.prompt) * (1 + params.prompt_logprobs)
    return REQUEST + TOKEN * params.max_tokens + LOGPROBS * scored


def check_answer(size: int, limit: int) -> None:
    """Refuse an answer that is larger than the whole budget."""
    if size > limit:
        message = f"the answer may take {size} bytes and this server holds at most {limit}; "
        raise bad_value("max_tokens", message + "ask for fewer tokens, choices or logprobs", "answer_too_large")
