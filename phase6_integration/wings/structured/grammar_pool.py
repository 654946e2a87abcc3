"""GrammarPool: checks the grammars of requests, in processes with limits of time and memory, and keeps the verdicts."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from phase6_integration.api import tokenization
from phase6_integration.api.errors import RequestError, conflict
from phase6_integration.api.schemas import StructuredFields
from phase6_integration.api.state import Grammars
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.tokenizer_process import Checked, CheckGrammar, Killed, Setup
from phase6_integration.wings.structured.output_grammar import MAX_GRAMMAR, grammar_field, grammar_of, json_grammar

CHECKER = "phase6_integration.wings.structured.grammar_checker:GrammarChecker"
SECONDS = 2.0  # for a check
KEPT = 16 << 20  # characters of grammars with a verdict

Verdict = str | RequestError  # the grammar as the engine is to get it, or why it is refused


class GrammarPool(Grammars):
    """It has processes of its own: a grammar that takes its whole time limit delays no tokenization."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._max_waiting = engine.options.queued_per_client
        self._processes: tokenization.Processes | None = None
        if engine.tokenizer is not None:
            self._processes = tokenization.Processes(
                Setup(engine.options.tokenizer or engine.options.model, None, checker=CHECKER)
            )
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._size = 0  # characters of all of them

    def field(self, body: StructuredFields) -> str | None:
        return grammar_field(body)

    def of_schema(self, schema: Mapping[str, Any]) -> str:
        return json_grammar(schema)

    async def of(self, body: StructuredFields, tenant: str) -> str | None:
        given = grammar_of(body)
        return None if given is None else await self.check(given.value, tenant, given.param)

    async def check(self, grammar: str, tenant: str, param: str) -> str:
        if self._processes is None:
            raise conflict(
                param, f"{param}: this model has no tokenizer, which structured output needs", "no_tokenizer"
            )
        if not self._verdicts:
            self._processes.start()  # the second one too, before the first is busy for long
        if len(grammar) > MAX_GRAMMAR:
            message = f"a grammar may have at most {MAX_GRAMMAR} characters, this one has {len(grammar)}"
            raise conflict(param, f"{param}: {message}")
        key = f"{param} {grammar}"
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judge(self._processes, CheckGrammar(grammar, SECONDS), tenant, param)
        self._keep(key, verdict)
        if isinstance(verdict, RequestError):
            raise RequestError(400, verdict.message, param=param, code=verdict.code)
        return verdict

    async def _judge(self, processes: tokenization.Processes, job: CheckGrammar, tenant: str, param: str) -> Verdict:
        """The verdict of a process. One that was killed has none: it is asked once more, and nothing is kept."""
        result = await processes.attempt(job, tenant, self._max_waiting)
        if isinstance(result, Killed) and not result.late:
            result = await processes.attempt(job, tenant, self._max_waiting)
        try:
            done = tokenization.checked(result, job, param, "its grammar")
        except RequestError as error:
            if isinstance(result, Killed):
                raise
            return error
        assert isinstance(done, Checked)
        return done.grammar

    def _keep(self, key: str, verdict: Verdict) -> None:
        """As the latest one."""
        if self._verdicts.pop(key, None) is None:
            self._size += _size(key, verdict)
        self._verdicts[key] = verdict
        while self._size > KEPT:
            self._size -= _size(*self._verdicts.popitem(last=False))


def _size(key: str, verdict: Verdict) -> int:
    """The characters that are kept of a grammar: as it was given, and as the engine is to get it."""
    return len(key) + (len(verdict) if isinstance(verdict, str) else 0)


def attach(app: FastAPI) -> None:
    app.state.server.grammars = GrammarPool(app.state.server.engine)
