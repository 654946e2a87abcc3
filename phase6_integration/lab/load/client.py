"""The run: every request of a workload is made at its time, with no more of them at once than allowed."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from phase6_integration.http_client import LostError, Pool, RefusedError, Target, UnreachableError, first_model
from phase6_integration.lab.load.answer import Answer, Outcome
from phase6_integration.lab.load.report import Bounds, Report, report
from phase6_integration.lab.load.workload import Work, Workload

PATH = "/v1/completions"
Ask = Callable[[bytes], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of which server, and how. `concurrency` None: as many at once as come."""

    target: Target
    workload: Workload = field(default_factory=Workload)
    model: str | None = None  # None: the first that the server names
    concurrency: int | None = None
    stream: bool = True
    temperature: float = 0.0
    warmups: int = 1  # requests before, which do not count
    timeout: float = 600.0  # seconds for one request
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.warmups < 0:
            raise ValueError(f"warmups must be at least 0, got {self.warmups}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be above 0 and finite, got {self.timeout}")
        if not self.stream and self.bounds.of_streams:
            raise ValueError("without streaming there is no TTFT, TPOT or ITL to bound; e2el is left")

    def body(self, model: str, work: Work) -> bytes:
        """A request as JSON. Its length is exact: tokens in, and no end before max_tokens out."""
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
    load: Load, ended: Callable[[Outcome], None] | None = None, clock: Callable[[], float] = time.perf_counter
) -> Report:
    """UnreachableError if there is no server, RefusedError if it refuses a warm-up. `ended` is told of every other."""
    pool = Pool(load.target, clock)
    try:
        await pool.reach()
        model = load.model or await first_model(pool)

        def request(work: Work) -> bytes:
            return load.target.request("POST", PATH, load.body(model, work))

        async def ask(written: bytes) -> Outcome:
            outcome = await _ask(pool, written, load, clock)
            if ended is not None:
                ended(outcome)
            return outcome

        works = list(load.workload.works())
        requests = [(work.time, request(work)) for work in works]
        backwards = works[0]._replace(prompt=works[0].prompt[::-1])  # so that no prefix is known before it counts
        for _ in range(load.warmups):
            first = await _ask(pool, request(backwards), load, clock)
            if first.error is not None:
                raise RefusedError(f"{load.target.origin} {first.error}")
        start = clock()
        outcomes = await made(requests, ask, load.concurrency, clock)
        seconds = max((outcome.ended for outcome in outcomes), default=start) - start
        return report(outcomes, seconds, load.bounds, model, load.workload, load.concurrency)
    finally:
        pool.close()


async def made(
    requests: Sequence[tuple[float, bytes]],
    ask: Ask,
    concurrency: int | None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Outcome]:
    """The outcomes of all, in the order in which they were due.

    Each caller takes the next request when it has done with its last. With a bound there are as many callers, and one
    that is late for a request makes it at once; without one there is a caller for each.
    """
    start, todo = clock(), iter(enumerate(requests))
    outcomes: dict[int, Outcome] = {}

    async def caller(mine: Iterator[tuple[int, tuple[float, bytes]]]) -> None:
        for number, (due, written) in mine:
            wait = start + due - clock()
            if wait > 0:
                await sleep(wait)
            outcomes[number] = await ask(written)

    async with asyncio.TaskGroup() as callers:
        if concurrency is None:
            for numbered in todo:
                callers.create_task(caller(iter([numbered])))
        else:
            for _ in range(min(concurrency, len(requests))):
                callers.create_task(caller(todo))
    return [outcomes[number] for number in range(len(requests))]


async def _ask(pool: Pool, written: bytes, load: Load, clock: Callable[[], float]) -> Outcome:
    """A connection that is lost, and a server that is gone in the middle of the run, are outcomes as well."""
    answer = Answer(clock(), load.stream)
    try:
        async with asyncio.timeout(load.timeout):
            await pool.exchange(written, answer)
    except TimeoutError:
        return Outcome(answer.sent, clock(), error=f"no whole answer within {load.timeout:g} s")
    except (UnreachableError, LostError) as error:
        return Outcome(answer.sent, clock(), error=str(error))
    return answer.outcome(clock())
