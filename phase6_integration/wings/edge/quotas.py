"""Quotas: what one client may have in progress and use in a minute, and what all answers may take of the memory."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from phase0_request.request import FinishReason
from phase6_integration.api.errors import RequestError, unservable
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import ServerState
from phase6_integration.process.async_engine import Observer
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Output, OutputStream
from phase6_integration.wings.edge.memory_budget import BODIES, SMALL_ANSWER, MemoryBudget, answer_bytes

MINUTE = 60.0


class Quotas(Observer):
    """Checks the requests of one body before the engine gets them, and counts them until the engine has ended them.

    The tokens of a client are a bucket that holds a minute's worth and is refilled all the time. How long an answer
    will be is not known when its request arrives, so a client may overdraw its bucket, and is refused until it has made
    that good.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        memory = settings.max_buffered_bytes
        self.answers = MemoryBudget(memory - memory // BODIES, SMALL_ANSWER)
        self._most_completions, self._tokens_per_minute = settings.max_requests_per_client, settings.tokens_per_minute
        self._clock = clock
        self._unfinished = Counter[str]()  # completions, by tenant
        self._full_at: dict[str, float] = {}  # when the bucket of a tenant is full again
        self._swept = clock()

    @contextmanager
    def lease(self, request: EngineRequest, length_field: str) -> Iterator[Callable[[int], None]]:
        """Hold memory for the answer. RequestError if the client is at a limit, or if there is too little."""
        size = answer_bytes(request, self.answers, length_field)
        self.check(request.tenant, len(request.numbers))
        with self.answers.hold(size) as hold:
            yield lambda text_bytes: hold.cover(size + text_bytes)

    def check(self, tenant: str, completions: int) -> None:
        """A RequestError if the client may not have so many completions more now."""
        most, tokens = self._most_completions, self._tokens_per_minute
        if most is not None and completions > most:
            raise unservable("n", f"a client may have {most} unfinished completions, got {completions} in one request")
        if most is not None and self._unfinished[tenant] + completions > most:
            raise _refused(f"at most {most} completions of a client may be unfinished; try again later", 1)
        if tokens is not None and (seconds := self._until_full(tenant) - MINUTE) >= 0:
            raise _refused(f"this client has used its {tokens} tokens a minute; try again later", seconds)

    def submitted(self, request: EngineRequest) -> None:
        self._unfinished[request.tenant] += len(request.numbers)
        self._use(request.tenant, sum(map(len, request.prompts)))

    def finished(self, stream: OutputStream, output: Output, reason: FinishReason) -> None:
        tenant = stream.request.tenant
        if unfinished := self._unfinished.pop(tenant, 1) - 1:
            self._unfinished[tenant] = unfinished
        self._use(tenant, output.generated)

    def _use(self, tenant: str, tokens: int) -> None:
        if self._tokens_per_minute is None:
            return
        now = self._clock()
        self._full_at[tenant] = now + self._until_full(tenant) + tokens * MINUTE / self._tokens_per_minute
        if now - self._swept > MINUTE:
            self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
            self._swept = now

    def _until_full(self, tenant: str) -> float:
        """Seconds."""
        return max(self._full_at.get(tenant, 0.0) - self._clock(), 0.0)


def _refused(message: str, seconds: float) -> RequestError:
    headers = {"retry-after": str(max(math.ceil(seconds), 1))}
    return RequestError(429, message, code="rate_limit_exceeded", headers=headers)


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    quotas = app.state.quotas = Quotas(server.settings)
    server.lease = quotas.lease
    server.engine.observers += (quotas,)
