"""The client: sends each request of a workload at its time, with a limit on concurrency."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
import msgspec

from phase0_request.checks import check_bool, check_number
from phase6_integration.engine.options import at_least, check_fields, option, positive
from phase6_integration.load.connection import ConnectionLostError, Pool, UnreachableError
from phase6_integration.load.report import SLO, Report, report
from phase6_integration.load.response import Outcome, Response
from phase6_integration.load.workload import Work, Workload

PATH = "/v1/completions"
Send = Callable[[bytes], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """A workload for one server, and how to send it."""

    url: str  # without /v1
    api_key: str | None = field(default=None, repr=False)
    workload: Workload = field(default_factory=Workload)
    slo: SLO = field(default_factory=SLO)
    model: str | None = option(None, "name of the model there (the first that the server lists)", "NAME")
    concurrency: int | None = option(
        None, "most requests at once (no limit)", "N", at_least(1), ("--concurrency", "--max-concurrency")
    )
    stream: bool = option(True, "stream the answers", check=check_bool)
    temperature: float = option(0.0, "sampling temperature", "T", partial(check_number, low=0))
    warmups: int = option(1, "requests before the measurement", check=at_least(0))
    timeout: float = option(600.0, "for one request", "SECONDS", positive)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stream and self.slo.needs_stream:
            raise ValueError("without streaming there is no TTFT, TPOT or ITL to limit, only e2el")

    def body(self, model: str, work: Work) -> bytes:
        """A request as JSON. The prompt is token ids and the EOS token is ignored, so both lengths are exact."""
        fields = {
            "model": model,
            "prompt": work.prompt,
            "max_tokens": work.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
        }
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields)


async def run(
    load: LoadTest, ended: Callable[[Outcome], None] | None = None, clock: Callable[[], float] = time.perf_counter
) -> Report:
    """Run the load. OSError if there is no server, ValueError if it refuses a warm-up. `ended` is called with the
    outcome of every measured request."""
    pool = Pool(load.url, load.api_key, clock)
    try:
        model = load.model or await _first_model(load)

        def request(work: Work) -> bytes:
            return pool.request("POST", PATH, load.body(model, work))

        async def send(written: bytes) -> Outcome:
            outcome = await _send(pool, written, load, clock)
            if ended is not None:
                ended(outcome)
            return outcome

        works = list(load.workload.works())
        requests = [(work.time, request(work)) for work in works]
        reversed_prompt = works[0]._replace(prompt=works[0].prompt[::-1])  # leaves no prefix of the run in the cache
        for _ in range(load.warmups):
            first = await _send(pool, request(reversed_prompt), load, clock)
            if first.error is not None:
                raise ValueError(f"{load.url} {first.error}")
        start = clock()
        outcomes = await send_all(requests, send, load.concurrency, clock)
        seconds = max((outcome.ended for outcome in outcomes), default=start) - start
        return report(outcomes, seconds, load.slo, model, load.workload, load.concurrency)
    finally:
        await pool.close()


async def send_all(
    requests: Sequence[tuple[float, bytes]],
    send: Send,
    concurrency: int | None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Outcome]:
    """Send requests at their times and return their outcomes in the same order.

    Without a limit the loop is open: each request has a worker, and is sent at its time. With a limit there are as many
    workers, and each takes the next request when it has finished the last; one that is late sends at once.
    """
    start, todo = clock(), iter(enumerate(requests))
    outcomes: dict[int, Outcome] = {}

    async def worker(mine: Iterator[tuple[int, tuple[float, bytes]]]) -> None:
        for index, (due, written) in mine:
            wait = start + due - clock()
            if wait > 0:
                await sleep(wait)
            outcomes[index] = await send(written)

    async with asyncio.TaskGroup() as workers:
        if concurrency is None:
            for numbered in todo:
                workers.create_task(worker(iter([numbered])))
        else:
            for _ in range(min(concurrency, len(requests))):
                workers.create_task(worker(todo))
    return [outcomes[index] for index in range(len(requests))]


async def _send(pool: Pool, written: bytes, load: LoadTest, clock: Callable[[], float]) -> Outcome:
    """Send one request. A time-out and a lost connection are outcomes, not exceptions."""
    response = Response(clock(), load.stream)
    try:
        async with asyncio.timeout(load.timeout):
            await pool.exchange(written, response)
    except TimeoutError:
        return Outcome(response.sent, clock(), error=f"no whole answer within {load.timeout:g} s")
    except (UnreachableError, ConnectionLostError) as error:
        return Outcome(response.sent, clock(), error=str(error))
    return response.outcome(clock())


def first_model(response: httpx.Response) -> str:
    """The first model in the response of GET /v1/models. ValueError if there is none."""
    try:
        content = response.json()
        if response.status_code == 200:
            return str(content["data"][0]["id"])
        message = content["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = "no model is listed at /v1/models"
    raise ValueError(f"{response.url} answered {response.status_code}: {message}")


async def _first_model(load: LoadTest) -> str:
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    async with httpx.AsyncClient(base_url=load.url, headers=headers) as client:
        try:
            return first_model(await client.get("/v1/models"))
        except httpx.TransportError as error:
            raise UnreachableError(f"no server answers at {load.url} ({error}); is it running?") from None
