"""An engine without a model: the HTTP process's side of the real one, and behind it a script instead of a process."""

import asyncio
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import cycle, islice
from typing import Any

import httpx2
import uvicorn
import uvloop

from phase0_request.params import TokenLogprobs
from phase0_request.request import FinishReason, Request
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app, server_config
from phase6_integration.engine.connect_engine import engine_options
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest, Finish, Progress, Update

Script = Callable[[Request], Sequence[int | FinishReason]]


def echo(request: Request) -> Sequence[int | FinishReason]:
    """The tokens of the prompt again and again, up to max_tokens."""
    return list(islice(cycle(request.prompt_tokens), request.params.max_tokens))


def scores(asked: int | None, token: int) -> TokenLogprobs | None:
    """A token's own logprob is -1; of its alternatives, itself first, each is half as likely as the one before."""
    if asked is None:
        return None
    return TokenLogprobs(-1.0, tuple((token + i, -1.0 - i) for i in range(asked)))


def embedding(prompt_tokens: int, size: int = 3) -> "array[float]":
    """Of a prompt of so many tokens."""
    return array("f", [prompt_tokens, 4.0, *[0.5] * (size - 2)])


def report(*told: Any) -> bytes | None:
    """What the engine's side of an extra says of a token: its logprobs, those of the prompt, and an embedding."""
    if all(one is None for one in told):
        return None
    from phase6_integration.extras.fields.token_details import Report, encode

    logprobs, prompt, state = told
    return encode(Report(logprobs, prompt, embedding=state))


def ended(id: str, reason: FinishReason, error: str | None = None) -> Progress:
    return Progress(id, finish_reason=reason, error=error)


class FakeEngine(AsyncEngine):
    """Answers by a script; without one, only as the test says (`tell`). `room` cleared: no request is admitted. `flow`
    cleared: no more tokens come. `cached`: of every prompt. `sent` has the messages to the engine."""

    def __init__(self, script: Script | None = echo, factory: str = "", **options: Any) -> None:
        super().__init__(engine_options(**options))
        self.script = script
        self.sent: list[Any] = []
        self.submitted: list[Request] = []  # completions
        self.cached = 0
        self.room, self.flow = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.flow.set()
        self.health, self.reason = Health.READY, "ready"
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "FakeEngine":
        return self

    async def start(self) -> None:
        self.health, self.reason = Health.READY, "ready"

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def asked(self) -> list[EngineRequest]:
        return [message for message in self.sent if isinstance(message, EngineRequest)]

    @property
    def dropped(self) -> list[str]:
        """The ids of completions that the engine was to finish."""
        return [message.id for message in self.sent if isinstance(message, Finish)]

    def tell(self, *progress: Progress) -> None:
        """Act as the engine after a step."""
        self.handle(Update(time.monotonic(), 0.001, 0, len(progress), list(progress), self.gauges))

    def say(self, id: str, *tokens: int, reason: FinishReason | None = None) -> None:
        """These tokens of a completion, a step each; the last one with the reason."""
        for number, token in enumerate(tokens, 1):
            self.tell(Progress(id, token, finish_reason=reason if number == len(tokens) else None))

    def write(self, id: str, text: str, reason: FinishReason | None = None) -> None:
        """The tokens of a text, a step each."""
        assert self.tokenizer is not None
        self.say(id, *self.tokenizer.encode(text), reason=reason)

    def _send(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, EngineRequest):
            for request in map(message.completion, message.numbers):
                self.submitted.append(request)
                if self.script is not None:
                    answer = self._answer(request, self.script)
                    self._tasks[request.id] = asyncio.get_running_loop().create_task(answer)
        elif isinstance(message, Finish) and (task := self._tasks.pop(message.id, None)) is not None:
            task.cancel()
            self.tell(ended(message.id, message.reason))

    async def _answer(self, request: Request, script: Script) -> None:
        said = list(script(request))
        if (error := self._refused(request)) is not None:
            return self.tell(ended(request.id, FinishReason.ERROR, error))
        await self.room.wait()
        if request.id not in self._live:  # the server has shut down meanwhile
            return None
        if not isinstance(said[0], FinishReason):  # else it ends while it waits
            self.tell(Progress(request.id, admitted=time.monotonic(), cached=self.cached))
        for number, token in enumerate(said, 1):
            await asyncio.sleep(0)
            await self.flow.wait()
            if request.id not in self._live:
                return None
            if isinstance(token, FinishReason):
                error = "a reason that no client may see" if token is FinishReason.ERROR else None
                progress = ended(request.id, token, error)
            else:
                progress = self._token(request, token, number, last=number == len(said))
            if progress.finish_reason is not None:
                self._tasks.pop(request.id, None)
            self.tell(progress)
            if progress.finish_reason is not None:
                return None
        return None

    def _token(self, request: Request, token: int, number: int, last: bool) -> Progress:
        params, reason = request.params, None
        if token in self.config.eos_token_id or token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif last or number >= params.max_tokens:
            reason = FinishReason.LENGTH
        asked = params.prompt_logprobs
        prompt = None
        if number == 1 and asked is not None:
            prompt = [score for prompt_token in request.prompt_tokens[1:] if (score := scores(asked, prompt_token))]
        state = embedding(len(request.prompt_tokens)).tobytes() if params.embed else None
        return Progress(request.id, token, reason, more=report(scores(params.logprobs, token), prompt, state))

    def _refused(self, request: Request) -> str | None:
        """Why the engine's processes would refuse the grammar of a request. Here it is compiled in this one."""
        if request.params.grammar is None or self.tokenizer is None:
            return None
        from tests.phase6_integration.cities import refused

        return refused(self.tokenizer, request.params.grammar)


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
    transport = httpx2.ASGITransport(app, raise_app_exceptions=True)
    async with httpx2.AsyncClient(transport=transport, base_url="http://front") as http:
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
                config = server_config(create_app(engine, settings), settings)
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
