"""A server that runs, and clients that are no more than sockets: they read as they like, and leave when they like."""

import asyncio
import contextlib
import io
import json
import re
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

import torch

from phase0_request.tokenizer import BUNDLED, Tokenizer
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.test_identity import theirs
from tests.phase6_integration.life import PATIENCE, Life, life

T = TypeVar("T")
COMPLETIONS = "/v1/completions"


def run(test: Coroutine[Any, Any, T], seconds: float = PATIENCE) -> T:
    """Run to the end; a test that waits for ever fails."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await test

    return asyncio.run(bounded())


# What is right.


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a completion, put together again if it came in pieces."""

    text: str
    tokens: list[str] | None  # by their names, if logprobs were asked for
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Oracle:
    """transformers' own class with random weights, saved beside the bundled tokenizer. It never ends by itself."""

    model: Any
    tokenizer: Tokenizer

    @classmethod
    def saved(cls, directory: Path, **options: Any) -> "Oracle":
        model = tiny_model("qwen3", vocab_size=4096, **options)
        saved(model, directory)
        shutil.copy(BUNDLED / "tokenizer.json", directory)
        return cls(model, Tokenizer.from_pretrained(directory))

    def answers(self, prompts: Sequence[list[int]], output: int) -> list[Answer]:
        """What it generates greedily, as a client with logprobs gets it."""
        from phase6_integration.extras.fields.logprobs import TokenNames

        names, threads = TokenNames(self.tokenizer), torch.get_num_threads()
        torch.set_num_threads(1)  # it is small: what threads say to each other takes longer than what they compute
        try:
            found = [theirs(self.model, prompt, output) for prompt in prompts]
        finally:
            torch.set_num_threads(threads)
        return [Answer(self.tokenizer.decode(one), [names[token].text for token in one], "length") for one in found]


# Servers.


@contextlib.contextmanager
def serving(*arguments: str, stop: bool = True, factory: str = "") -> Iterator[tuple[Life, str]]:
    """`nanoserve serve` with every invariant checked after every step, READY, and its address. After the block it is
    told to stop, unless the block has done so: it must end in order, and have had nothing to complain of."""
    with life("--check-invariants", *arguments, factory=factory) as one:
        url = one.listening()
        one.until("ready")
        try:
            yield one, url
        except BaseException:
            one.process.kill()
            one.ended()
            print(*one.lines, sep="\n")  # pytest shows it beside the failure
            raise
        if stop:
            one.signal(signal.SIGTERM)
        assert one.ended() == 0
    assert [line for line in one.lines if "Traceback" in line or re.search(r"level=(warning|error) ", line)] == []


async def idle(url: str) -> dict[str, Any]:
    """Wait until no request is live; then every page must be free or cached. Returns /stats."""
    while True:
        stats: dict[str, Any] = json.loads((await get(url, "/stats")).body)
        requests, pages = stats["requests"], stats["pages"]
        if requests["running"] == requests["waiting"] == pages["used"] == 0:
            assert pages["free"] + pages["cached"] == pages["total"] > 0
            return stats


# Clients.


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has the one shape and nothing beside it."""
        return error_of(self.json)

    @property
    def events(self) -> list[str]:
        """The data of server-sent events; comments are dropped. The last one must be whole."""
        assert self.headers["content-type"].startswith("text/event-stream"), self
        assert self.body.endswith(b"\n\n"), self.body[-100:]
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert all(block.startswith(("data: ", ": ")) for block in blocks), blocks
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def error_of(content: Any) -> dict[str, Any]:
    assert content.keys() == {"error"}
    error: dict[str, Any] = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def request(body: object = None, path: str = COMPLETIONS) -> bytes:
    """The bytes of a POST, or of a GET if there is no body. Bytes are sent as they are."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content


@contextlib.asynccontextmanager
async def line(url: str, said: bytes, *, buffer: int | None = None) -> AsyncIterator[asyncio.StreamReader]:
    """A line of one's own, on which this was said. After the block it is cut. `buffer`: what may lie unread."""
    host, port = url.removeprefix("http://").split(":")
    ours = socket.socket()
    if buffer is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    ours.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(ours, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=ours, limit=buffer or 1 << 16)
    except BaseException:
        ours.close()
        raise
    try:
        writer.write(said)
        yield reader
    finally:
        writer.transport.abort()


async def ask(url: str, body: object, path: str = COMPLETIONS) -> Response:
    """One request, and all of its response."""
    async with line(url, request(body, path)) as reader:
        return parsed(await reader.read())


async def get(url: str, path: str) -> Response:
    async with line(url, request(path=path)) as reader:
        return parsed(await reader.read())


class _Received:
    """Bytes in place of the socket that http.client reads a response from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def parsed(content: bytes) -> Response:
    """What came on a line to its end. It must be a whole response."""
    response = HTTPResponse(_Received(content))  # type: ignore[arg-type]
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    assert headers["x-request-id"]
    return Response(response.status, headers, response.read())


def answer(response: Response) -> Answer:
    """The one choice of a response, whole or streamed."""
    assert response.status == 200, response
    if response.headers["content-type"] == "application/json":
        (choice,) = response.json["choices"]
        return _joined([choice])
    *chunks, done = response.events
    assert done == "[DONE]"
    return _joined([choice for chunk in chunks for choice in json.loads(chunk)["choices"]])


def _joined(pieces: list[dict[str, Any]]) -> Answer:
    *others, last = pieces
    assert all(piece["finish_reason"] is None for piece in others)
    assert all(piece["text"] for piece in others), "no empty chunks"
    told = [piece["logprobs"]["tokens"] for piece in pieces if piece["logprobs"]]
    tokens = [token for tokens in told for token in tokens] if told else None
    return Answer("".join(piece["text"] for piece in pieces), tokens, last["finish_reason"])
