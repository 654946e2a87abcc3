"""Quotas: what one client may have in progress, and what all answers may take of the memory."""

from fastapi import FastAPI

from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import Lease, ServerState
from phase6_integration.process.messages import EngineRequest
from phase6_integration.wings.edge.client_limits import ClientLimits
from phase6_integration.wings.edge.memory_budget import MemoryBudget, answer_bytes


class Quotas:
    """Checks the requests of one body before the engine gets them, and counts them while they are answered."""

    def __init__(self, settings: ServerSettings) -> None:
        self.clients = ClientLimits(settings)
        self.answers = MemoryBudget.for_answers(settings.max_buffered_bytes)

    def lease(self, request: EngineRequest, length_field: str) -> "AnswerLease":
        """RequestError if the client is at a limit, or if there is too little memory. `length_field` sets the length
        of the answer."""
        size = answer_bytes(request, self.answers, length_field)
        lease = AnswerLease(self, request.tenant, len(request.numbers), size)
        try:
            lease.cover(0)
            self.clients.check(lease.tenant, lease.completions)
        except BaseException:
            lease.__exit__()
            raise
        return lease


class AnswerLease(Lease):
    """The memory of one answer, and its completions in the count of its client."""

    def __init__(self, quotas: Quotas, tenant: str, completions: int, size: int) -> None:
        self.tenant, self.completions, self._size = tenant, completions, size
        self._clients, self._memory = quotas.clients, quotas.answers.hold()

    def begin(self, prompt_tokens: int) -> None:
        self._clients.begin(self.tenant, self.completions, prompt_tokens)

    def cover(self, text_bytes: int) -> None:
        self._memory.cover(self._size + text_bytes)

    def __exit__(self, *_: object) -> None:
        self._memory.__exit__()


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    quotas = Quotas(server.settings)
    server.lease = quotas.lease
    server.engine.observers += (quotas.clients,)
    app.state.quotas = quotas
