"""MemoryBudget: bounds the memory that request bodies and unsent answers take together.

A body takes its own size while it arrives. An answer takes, before any work is done for it, the most it can need:
`answer_bytes`. A request that does not fit now gets a 503 with a time to retry, and a request that can never fit a 400.
Small bodies and answers are free, since connections and queue places bound their number. So a few large ones cannot
lock out the others.
"""

from fastapi import FastAPI

from phase6_integration.api.errors import bad_value, overloaded
from phase6_integration.api.state import ServerState
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.process.messages import EngineRequest

BODIES = 4  # all request bodies together may take 1/4 of the whole budget, and answers the rest
ANSWER = 4  # one answer may take 1/4 of what all answers may take
SMALL_BODY = 16 << 10  # bytes
SMALL_ANSWER = 64 << 10

# The bytes that an answer takes in this process; measured by a test.
REQUEST = 14 << 10  # for a request
COMPLETION = 10 << 10  # for each of its completions
PROMPT = 96  # for each token of a prompt: its id, and for echo its offset
MASKS = 4  # for each byte of a list of allowed tokens: it is here, on its way, and in the engine
TOKEN = 48  # for each output token: its id, offset, time and text, of which few tokens have more
EMBEDDING = 48 << 10  # for an embedding of up to 8,192 numbers, of which one at a time is text
LOGPROBS = 20  # for the logprob of a token, and as much for each alternative


class MemoryBudget:
    """`limit` bytes, which requests share. The first `free` bytes of each request do not count."""

    def __init__(self, limit: int, free: int = 0) -> None:
        self.limit = limit
        self.free = free
        self.used = 0

    def hold(self, size: int = 0) -> "Hold":
        hold = Hold(self)
        hold.cover(size)
        return hold


class Hold:
    """Bytes of a budget, held until the end of a `with` block."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held = 0

    def cover(self, size: int) -> None:
        """Hold at least `size` bytes. A RequestError if too few are left."""
        more = max(size - self._budget.free - self._held, 0)
        if self._budget.used + more > self._budget.limit:
            raise overloaded()
        self._held += more
        self._budget.used += more

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.used -= self._held
        self._held = 0


def answer_bytes(request: EngineRequest, budget: MemoryBudget, param: str = "max_tokens") -> int:
    """The most bytes that the answer to a request can take, which must be a fraction of the budget. A prompt that is
    completed n times counts once, and so does a list of allowed tokens. `param` is the request field that sets the
    length."""
    params, lengths = request.params, list(map(len, request.prompts))
    size = REQUEST + PROMPT * sum(lengths) + (0 if params.allowed is None else MASKS * len(params.allowed.bits))
    for prompt, tokens in zip(lengths, request.lengths, strict=True):
        scored = 0 if params.logprobs is None else tokens * (1 + params.logprobs)
        scored += 0 if params.prompt_logprobs is None else prompt * (1 + params.prompt_logprobs)
        size += request.n * (COMPLETION + TOKEN * tokens + LOGPROBS * scored + EMBEDDING * params.embed)
    if size > (most := budget.limit // ANSWER):
        message = f"the answer may take {size} bytes of memory, and this server allows {most}; "
        raise bad_value(param, message + "ask for fewer tokens, choices or logprobs", "answer_too_large")
    return size


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    memory = server.settings.of(EdgeSettings).max_buffered_bytes
    answers = app.state.answers = MemoryBudget(memory - memory // BODIES, SMALL_ANSWER)
    server.lease = lambda request, length_field: answers.hold(answer_bytes(request, answers, length_field))
