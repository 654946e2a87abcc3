"""The client: sends each request of a workload at its time, with a limit on concurrency."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx2
import msgspec

from phase0_request.support.checks import check_bool, check_choice, check_number
from phase0_request.support.options import at_least, check_fields, option, positive
from phase6_integration.load.connection import ConnectionLostError, Pool, UnreachableError
from phase6_integration.load.report import SLO, Report, report
from phase6_integration.load.response import Outcome, Response, on_one_line
from phase6_integration.load.session import Session
from phase6_integration.load.workload import Workload

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Of prompts for the chat endpoint, which takes no token ids: short words, a token each in most vocabularies.
WORDS = (  # noqa: SIM905
    "time year people way day man thing woman life child world school state family group country problem hand part "
    "case week company system program question work number night point home water room mother area money story fact"
).split()
Send = Callable[[bytes, float], Awaitable[Outcome]]  # a request, and when it was planned
Requests = Generator[tuple[float, bytes], Outcome, None]  # a pause and a request; the outcome comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """A workload for one server, and how to send it."""

    url: str  # without /v1
    api_key: str | None = field(default=None, repr=False)
    workload: Workload = field(default_factory=Workload)
    slo: SLO = field(default_factory=SLO)
    model: str | None = option(None, "name of the model there (the first that the server lists)", "NAME")
    endpoint: str | None = option(
        None,
        f"{COMPLETIONS} or {CHAT} (the second for conversations, else the first)",
        "PATH",
        partial(check_choice, allowed=(COMPLETIONS, CHAT)),
    )
    concurrency: int | None = option(
        None, "most requests at once (no limit)", "N", at_least(1), ("--concurrency", "--max-concurrency")
    )
    stream: bool = option(True, "stream the answers", check=check_bool)
    ignore_eos: bool = option(
        True, "answers run to max_tokens; off for servers that refuse the field", check=check_bool
    )
    temperature: float = option(0.0, "sampling temperature", "T", partial(check_number, low=0))
    warmups: int = option(1, "requests before the measurement", check=at_least(0))
    timeout: float = option(600.0, "for one request", "SECONDS", positive)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stream and self.slo.needs_stream:
            raise ValueError("without streaming there is no TTFT, TPOT or ITL to limit, only e2el")

    def body(self, model: str, chat: bool, messages: Sequence[Any], max_tokens: int) -> bytes:
        """A request as JSON. A prompt of token ids and an ignored EOS token make both lengths exact."""
        fields = {"model": model, "max_tokens": max_tokens, "temperature": self.temperature}
        fields |= {"messages": messages} if chat else {"prompt": messages[-1]["content"]}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields)

    def requests(self, pool: Pool, model: str, chat: bool, session: Session) -> Requests:
        """The requests of a session. It ends early if one fails."""
        messages: list[Any] = []
        for turn in session.turns:
            words = chat and not isinstance(turn.prompt, str)
            prompt = " ".join(WORDS[int(token) % len(WORDS)] for token in turn.prompt) if words else turn.prompt
            messages.append({"role": "user", "content": prompt})
            body = self.body(model, chat, messages, turn.max_tokens)
            outcome = yield turn.pause, pool.request("POST", CHAT if chat else COMPLETIONS, body)
            if outcome.error is not None:
                return
            messages.append({"role": "assistant", "content": outcome.text})


class Script(NamedTuple):
    """A session that is ready: its first request is already written, outside of the measurement."""

    time: float | None
    first: bytes
    requests: Requests

    @classmethod
    def of(cls, time: float | None, requests: Requests) -> "Script":
        return cls(time, next(requests)[1], requests)


async def run(
    load: LoadTest, ended: Callable[[Outcome, int], None] | None = None, clock: Callable[[], float] = time.perf_counter
) -> Report:
    """Run the load. OSError if there is no server, ValueError if it refuses a warm-up or the trace cannot be read.
    `ended` is called with the outcome of every measured request, and how many there will be."""
    pool = Pool(load.url, load.api_key, clock)
    try:
        sessions = load.workload.sessions()
        several, turn = any(len(session.turns) > 1 for session in sessions), sessions[0].turns[0]
        chat = load.endpoint == CHAT or (load.endpoint is None and (several or isinstance(turn.prompt, str)))
        if several and not chat:
            raise ValueError(f"sessions of several requests need {CHAT}: the answers before are in each prompt")
        model = load.model or await _first_model(load)
        scripts = [Script.of(session.time, load.requests(pool, model, chat, session)) for session in sessions]
        count = sum(len(session.turns) for session in sessions)

        async def send_planned(written: bytes, planned: float) -> Outcome:
            outcome = await send(pool, written, load, clock, planned)
            if ended is not None:
                ended(outcome, count)
            return outcome

        unlike = turn._replace(prompt=turn.prompt[::-1])  # leaves no prefix of the run in the cache
        for _ in range(load.warmups):
            warm_up = Script.of(None, load.requests(pool, model, chat, Session(None, [unlike])))
            first = await send(pool, warm_up.first, load, clock, clock())
            if first.error is not None:
                raise ValueError(f"{load.url} {first.error}")
        start = clock()
        outcomes = await send_all(scripts, send_planned, load.concurrency, clock)
        return report(outcomes, start, load.slo, model, load.workload, load.concurrency)
    finally:
        await pool.close()


async def send_all(
    scripts: Sequence[Script],
    send: Send,
    concurrency: int | None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Outcome]:
    """Send the requests of all sessions at their times and return their outcomes in the same order.

    Without a limit the loop is open: each session has a worker. With a limit there are as many workers, and each takes
    the next session when it has finished the last. A request with a time was planned for that time, also if it is sent
    later: its latency counts from there. Any other was planned for the moment in which a worker takes it.
    """
    start, todo = clock(), iter(enumerate(scripts))
    outcomes: dict[int, list[Outcome]] = {index: [] for index in range(len(scripts))}

    async def worker(mine: Iterator[tuple[int, Script]]) -> None:
        for index, script in mine:
            planned, written = clock() if script.time is None else start + script.time, script.first
            while True:
                while (wait := planned - clock()) > 0:  # a timer may end a little early
                    await sleep(wait)
                outcomes[index].append(await send(written, planned))
                try:
                    pause, written = script.requests.send(outcomes[index][-1])
                except StopIteration:
                    break
                planned = clock() + pause

    async with asyncio.TaskGroup() as workers:
        if concurrency is None:
            for numbered in todo:
                workers.create_task(worker(iter([numbered])))
        else:
            for _ in range(min(concurrency, len(scripts))):
                workers.create_task(worker(todo))
    return [outcome for some in outcomes.values() for outcome in some]


async def send(pool: Pool, written: bytes, load: LoadTest, clock: Callable[[], float], planned: float) -> Outcome:
    """Send one request. A time-out and a lost connection are outcomes, not exceptions."""
    response = Response(planned, load.stream, clock() - planned)
    try:
        async with asyncio.timeout(load.timeout):
            await pool.exchange(written, response)
    except TimeoutError:
        return response.outcome(clock(), f"no whole answer within {load.timeout:g} s")
    except (UnreachableError, ConnectionLostError) as error:
        return response.outcome(clock(), str(error))
    return response.outcome(clock())


def first_model(response: httpx2.Response) -> str:
    """The first model in the response of GET /v1/models. ValueError if there is none."""
    try:
        content = response.json()
        if response.status_code == 200:
            return str(content["data"][0]["id"])
        message = content["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = "no model is listed at /v1/models"
    raise ValueError(f"{response.url} answered {response.status_code}: {on_one_line(str(message))}")


async def _first_model(load: LoadTest) -> str:
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    async with httpx2.AsyncClient(base_url=load.url, headers=headers) as client:
        try:
            return first_model(await client.get("/v1/models"))
        except httpx2.TransportError as error:
            raise UnreachableError(f"no server answers at {load.url} ({error}); is it running?") from None
