"""The bundled model in a process of its own, or one of `faults` in its place, and what it answers."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from phase0_request import SamplingParams
from phase6_integration.engine.connect_engine import engine_options
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.engine_client import BUNDLED_ENGINE
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Chunk, OutputStream
from tests.phase6_integration.life import PATIENCE

FAULTS = "tests.phase6_integration.faults"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
Test = Callable[[AsyncEngine], Coroutine[Any, Any, None]]
OnTheEngine = Callable[[Test], None]
PROMPTS = [tuple(range(20 + 3 * n, 60 + 3 * n, 2)) for n in range(8)]


@contextlib.asynccontextmanager
async def engine(fault: str = "", **options: Any) -> AsyncIterator[AsyncEngine]:
    """The bundled model on one thread, small, with every invariant checked after every step. A failure is final."""
    small = {"kv_cache_pages": 256, "threads": 1, "check_invariants": True, "max_engine_restarts": 0}
    given = engine_options(**{**small, **options})
    made = AsyncEngine(given, factory=f"{FAULTS}:{fault}" if fault else BUNDLED_ENGINE)
    async with made as ready:
        yield ready
    assert process(made).poll() is not None, "its process is still there"


@contextlib.contextmanager
def shared(fault: str = "", **options: Any) -> Iterator[OnTheEngine]:
    """One engine for the tests of a file, since it takes longer to start than most of them. It is idle after each; its
    prefix cache keeps their prompts."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        made = runner.run(stack.enter_async_context(engine(fault, **options)))

        async def bounded(test: Test) -> None:
            async with asyncio.timeout(PATIENCE):
                await test(made)
                await idle(made)

        yield lambda test: runner.run(bounded(test))
        runner.run(stack.aclose())


def process(made: AsyncEngine) -> "subprocess.Popen[bytes]":
    """Its current process."""
    assert made._client is not None
    assert made._client.process is not None
    return made._client.process


async def admitted(reply: OutputStream) -> None:
    """Wait until the engine has begun with a completion, or has ended it."""
    while not any(output.times.admitted or output.done for output in reply.outputs):
        await asyncio.sleep(0.001)


async def read(reply: OutputStream) -> list[list[Chunk]]:
    """All chunks of each answer."""
    answers: list[list[Chunk]] = [[] for _ in reply.outputs]
    async for chunks in reply:
        for chunk in chunks:
            answers[chunk.index].append(chunk)
    return answers


def request(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> EngineRequest:
    """A request of one prompt."""
    return EngineRequest(name, [tuple(prompt)], params, [params.max_tokens], **more)


async def answer(made: AsyncEngine, prompt: Sequence[int], params: SamplingParams = GREEDY, name: str = "one") -> Chunk:
    """All of an answer in one piece."""
    (chunks,) = await read(made.submit(request(name, prompt, params)))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    first, *others = chunks
    for chunk in others:
        first.extend(chunk)
    return first


async def idle(made: AsyncEngine) -> None:
    """Wait until no request is live, and no step in flight; then every page must be free or cached."""
    assert await made._is_idle(30)
    while (gauges := made.gauges).running or gauges.waiting or gauges.pages_used:
        await asyncio.sleep(0)
    assert gauges.pages_free + gauges.pages_cached == gauges.pages_total
