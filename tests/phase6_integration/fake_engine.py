"""An engine without a model: the real front's side of one, and behind it a script instead of a process.

By itself it says the tokens of the prompt again, from the first on, as many as it may. It can be told to say something
else, to make no room, to stop in the middle, to fail, and it keeps what it was asked and what it was told to drop.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import cycle, islice
from typing import Any

import httpx
import msgspec
import uvicorn
import uvloop

from phase0_request.request import FinishReason, Request, TokenLogprobs
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health
from phase6_integration.process.messages import Ended, EngineRequest, Finish, Output, Started, Update
from tests.phase6_integration.application import create_app, transport_config

Script = Callable[[Request], Sequence[int | FinishReason]]


def echo(submit: Request) -> Sequence[int | FinishReason]:
    return list(islice(cycle(submit.prompt_tokens), submit.params.max_tokens))


def scores(asked: int | None, token: int) -> TokenLogprobs | None:
    """A token's own logprob is -1; of its alternatives, itself first, each is half as likely as the one before."""
    if asked is None:
        return None
    return TokenLogprobs(-1.0, tuple((token + i, -1.0 - i) for i in range(asked)))


class FakeEngine(AsyncEngine):
    """`room` cleared: no request is admitted. `flow` cleared: no more tokens come. `cached`: of every prompt."""

    def __init__(self, script: Script = echo, factory: str = "", **options: Any) -> None:
        super().__init__(EngineOptions(**options))
        self.script = script
        self.asked: list[EngineRequest] = []
        self.submitted: list[Request] = []  # its completions
        self.dropped: list[str] = []
        self.cached = 0
        self.room = asyncio.Event()
        self.flow = asyncio.Event()
        self.room.set()
        self.flow.set()
        self.health, self.reason = Health.READY, "ready"
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "FakeEngine":
        return self

    async def start(self) -> None:
        self.health, self.reason = Health.READY, "ready"

    def _send(self, message: object) -> None:
        if isinstance(message, EngineRequest):
            self.asked.append(message)
            for request in map(message.completion, message.numbers):
                self.submitted.append(request)
                self._tasks[request.id] = asyncio.get_running_loop().create_task(self._answer(request))
        elif isinstance(message, Finish):
            self.dropped.append(message.id)
            if (task := self._tasks.pop(message.id, None)) is not None:
                task.cancel()
                self._tell(ended=[Ended(message.id, message.reason)])

    async def _answer(self, submit: Request) -> None:
        said = list(self.script(submit))
        if (error := self._refused(submit)) is not None:
            return self._tell(ended=[Ended(submit.id, FinishReason.ERROR, error)])
        await self.room.wait()
        if submit.id not in self._live:  # the front has shut down meanwhile
            return None
        if not isinstance(said[0], FinishReason):  # else it ends while it waits
            self._tell(started=[Started(submit.id, time.monotonic(), self.cached)])
        for i, one in enumerate(said):
            await asyncio.sleep(0)
            await self.flow.wait()
            if submit.id not in self._live:
                return None
            if isinstance(one, FinishReason):
                return self._give_up(submit, one)
            last = i + 1 >= len(said) or i + 1 >= submit.params.max_tokens
            reason = (
                FinishReason.STOP if one in self.config.eos_token_id or one in submit.params.stop_token_ids else None
            )
            if reason is None and last:
                reason = FinishReason.LENGTH
            self._tell(
                outputs=[self._output(submit, one, first=i == 0)], ended=[Ended(submit.id, reason)] if reason else []
            )
            if reason is not None:
                self._tasks.pop(submit.id, None)
                return None
        return None

    def _refused(self, submit: Request) -> str | None:
        """Why the engine's processes would refuse the grammar of a request. Here it is compiled in this one."""
        if submit.params.grammar is None or self.tokenizer is None:
            return None
        from tests.phase6_integration.cities import refused

        return refused(self.tokenizer, submit.params.grammar)

    def _output(self, submit: Request, token: int, first: bool) -> Output:
        asked = submit.params.prompt_logprobs
        prompt = [scores(asked, t) for t in submit.prompt_tokens[1:]] if first and asked is not None else None
        return Output(submit.id, token, scores(submit.params.logprobs, token), prompt)

    def _give_up(self, submit: Request, reason: FinishReason) -> None:
        self._tasks.pop(submit.id, None)
        error = "a reason that no client may see" if reason is FinishReason.ERROR else None
        self._tell(ended=[Ended(submit.id, reason, error)])

    def _tell(self, **what: Any) -> None:
        """As the engine does after a step: an output of a request that ends has the reason, too."""
        whole = {"started": [], "outputs": [], "ended": [], **what}
        reasons = {one.id: one.reason for one in whole["ended"]}
        whole["outputs"] = [msgspec.structs.replace(one, finish_reason=reasons.get(one.id)) for one in whole["outputs"]]
        self.handle(Update(time.monotonic(), 0.001, 0, len(whole["outputs"]), **whole, gauges=self.gauges))

    @property
    def live(self) -> int:
        return len(self._live)


def says(text: str, engine: AsyncEngine | None = None, end: bool = True) -> Script:
    """A script that says this text, and then the token that ends an answer."""

    def script(_: Request) -> list[int | FinishReason]:
        tokenizer = AsyncEngine(EngineOptions()).tokenizer if engine is None else engine.tokenizer
        assert tokenizer is not None
        return [*tokenizer.encode(text), *([min(tokenizer.eos_ids)] if end else [])]

    return script


@asynccontextmanager
async def client(engine: AsyncEngine, settings: ServerSettings | None = None) -> Any:
    """An HTTP client of the app itself, with no socket between."""
    app = create_app(engine, settings or ServerSettings())
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
        yield http


def events(body: bytes) -> Iterator[str]:
    """The data of server-sent events; comments are dropped."""
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            yield block.removeprefix("data: ")


@contextmanager
def served(
    make: Callable[[], AsyncEngine],
    settings: ServerSettings | None = None,
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    buffer: int | None = None,
) -> Iterator[str]:
    """A real server on a port of its own, in a thread of its own. `make` is called there. Yields its address. `buffer`:
    what the kernel holds for a client that does not read."""
    settings = settings or ServerSettings()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a client that connects before uvicorn runs waits for it
    with listener, ThreadPoolExecutor(1) as pool:
        server: Future[uvicorn.Server] = Future()

        async def serve() -> None:
            async with make() as engine:
                config = transport_config(create_app(engine, settings), settings)
                server.set_result(uvicorn.Server(config))
                await server.result().serve(sockets=[listener])

        def run() -> None:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(serve())

        done = pool.submit(run)
        done.add_done_callback(lambda ended: server.done() or server.set_exception(ended.exception() or EOFError()))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.result()
            yield url
        finally:
            if server.exception() is None:
                server.result().should_exit = True
            done.result()
