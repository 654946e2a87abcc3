"""One request to an app with no socket between: the test decides when the client reads and when it leaves."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec

from fastapi import FastAPI

P = ParamSpec("P")


def awaited(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine. One that waits for ever fails."""

    @wraps(test)
    def runs(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 120))

    return runs


class Call:
    """`async with Call(app, path, body) as call`: the app answers in the background. `reads` cleared: the client does
    not read. `leave()`: it hangs up."""

    def __init__(self, app: FastAPI, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        self._app = app
        self._body = json.dumps(body).encode()
        given = {
            "host": "front",
            "content-type": "application/json",
            "content-length": str(len(self._body)),
            **(headers or {}),
        }
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("front", 80),
        }
        self._gone = asyncio.Event()
        self._news = asyncio.Condition()
        self._sent_body = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.waits = False  # a send, for the client to read
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.content = b""
        self.sends = 0  # of body
        self.complete = False
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Call":
        self.task = asyncio.create_task(self._app(self.scope, self._receive, self._send))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self.task is not None
        if kind is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        else:
            await self.task

    def leave(self) -> None:
        self._gone.set()

    async def until(self, enough: Any) -> None:
        """Wait until so much has been sent, whatever that is."""
        async with self._news:
            await self._news.wait_for(lambda: enough(self))

    @property
    def events(self) -> list[Any]:
        """What was streamed, read as JSON; [DONE] as it is. Comments are left out."""
        blocks = [block for block in self.content.decode().split("\n\n") if block.startswith("data: ")]
        data = [block.removeprefix("data: ") for block in blocks]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.waits = not self.reads.is_set()
        await self.reads.wait()
        async with self._news:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.sends += 1
                self.content += message.get("body", b"")
                self.complete = not message.get("more_body", False)
            self._news.notify_all()
