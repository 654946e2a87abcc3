"""Limits of each client: unfinished completions, and tokens a minute. Both are off unless they are set."""

import math
import time
from collections import Counter
from collections.abc import Callable

from phase0_request.request import FinishReason
from phase6_integration.api.errors import RequestError, conflict
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import StepReport
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Output

MINUTE = 60.0


class ClientLimits:
    """Refuses requests of clients that are at a limit. It observes the engine, and so counts what they generate.

    Tokens are a bucket that holds a minute's worth and is refilled all the time. How long an answer will be is not
    known when its request arrives, so a client may overdraw its bucket, and is refused until it has made that good.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = settings.max_requests_per_client
        self._tokens = settings.tokens_per_minute
        self._clock = clock
        self._unfinished = Counter[str]()  # completions, by tenant
        self._used: dict[str, tuple[float, float]] = {}  # by tenant: tokens out of its bucket, at a time
        self._swept = clock()

    def check(self, tenant: str, completions: int) -> None:
        """Raise a 429 if the client may not have so many completions more now."""
        limit, tokens = self._requests, self._tokens
        if limit is not None and completions > limit:
            raise conflict("n", f"a client may have {limit} unfinished completions, got {completions} in one request")
        if limit is not None and self._unfinished[tenant] + completions > limit:
            raise _refused(f"at most {limit} completions of a client may be unfinished; try again later", 1)
        if tokens is not None and (over := self._out(tenant) - tokens) >= 0:
            message = f"this client has used its {tokens} tokens a minute; try again later"
            raise _refused(message, max(math.ceil(over / tokens * MINUTE), 1))

    def begin(self, tenant: str, completions: int, prompt_tokens: int) -> None:
        """Count the completions of a request that the engine has taken."""
        if self._requests is not None:
            self._unfinished[tenant] += completions
        self._use(tenant, prompt_tokens)

    def finished(self, request: EngineRequest, output: Output, reason: FinishReason) -> None:
        tenant = request.tenant
        if self._requests is not None:
            self._unfinished[tenant] -= 1
            if self._unfinished[tenant] <= 0:
                del self._unfinished[tenant]
        self._use(tenant, output.generated)

    def stepped(self, report: StepReport) -> None:
        """Nothing: tokens are counted when their completion has finished."""

    def _use(self, tenant: str, tokens: int) -> None:
        if self._tokens is None:
            return
        now = self._clock()
        self._used[tenant] = self._out(tenant) + tokens, now
        if now - self._swept > MINUTE:
            self._used = {name: used for name, used in self._used.items() if self._out(name)}
            self._swept = now

    def _out(self, tenant: str) -> float:
        """The tokens that are out of the bucket now."""
        used, at = self._used.get(tenant, (0.0, 0.0))
        return max(used - (self._clock() - at) * (self._tokens or 0) / MINUTE, 0.0)


def _refused(message: str, seconds: int) -> RequestError:
    return RequestError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(seconds)})
