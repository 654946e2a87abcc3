"""A server that sends scripted responses, for tests of clients. It keeps the requests."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Heard:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Body


@dataclass(frozen=True)
class Said:
    """One response. `cut`: the connection is closed after that many bytes of the body. `close`: it is after the end.
    `hang`: the end never comes."""

    body: bytes
    status: int = 200
    kind: str = "application/json"
    pieces: int = 1  # in which the body is sent, as chunks
    cut: int | None = None
    close: bool = False
    hang: bool = False


def said(content: Body, status: int = 200) -> Said:
    return Said(json.dumps(content).encode(), status)


def stream(events: list[Body | str], pieces: int = 1) -> Said:
    """Server-sent events; [DONE] comes of itself."""
    texts = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in [*events, "data: [DONE]"]]
    return Said("".join(f"{text}\n\n" for text in texts).encode(), kind="text/event-stream", pieces=pieces)


def completion(body: Body, tokens: int | None = None, cached: int = 0) -> Said:
    """What /v1/completions answers to this, streamed or not: a word for each token."""
    count = body["max_tokens"] if tokens is None else tokens
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if not body.get("stream"):
        return said({"choices": [{"index": 0, "text": "word " * count, "finish_reason": "length"}], "usage": usage})
    words: list[Body | str] = [{"choices": [{"index": 0, "text": "word ", "finish_reason": None}]}] * (count - 1)
    last = {"choices": [{"index": 0, "text": "word", "finish_reason": "length"}]}
    return stream([*words, ": keep-alive", last, {"choices": [], "usage": usage}])


def models(*names: str) -> Said:
    return said({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@dataclass
class Scripted:
    """`answer` decides. GET /v1/models is answered with `tiny` unless it does."""

    answer: Callable[[Heard], Said | None]
    heard: list[Heard] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    @property
    def asked(self) -> list[Heard]:
        return [one for one in self.heard if one.method == "POST"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (heard := await _heard(reader)) is not None:
                self.heard.append(heard)
                answer = self.answer(heard) or (models("tiny") if heard.path == "/v1/models" else _unknown())
                if not await _say(answer, reader, writer):
                    return
        except ConnectionError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def scripted(answer: Callable[[Heard], Said | None]) -> AsyncIterator[Scripted]:
    """On a free port of this machine."""
    one = Scripted(answer)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()


@contextmanager
def in_a_thread(answer: Callable[[Heard], Said | None]) -> Iterator[Scripted]:
    """The same for a client that is no coroutine, or another process."""
    started, ending = threading.Event(), asyncio.Event()
    kept: list[Any] = []

    async def life() -> None:
        async with scripted(answer) as one:
            kept.extend((asyncio.get_running_loop(), one))
            started.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: asyncio.run(life()))
    thread.start()
    assert started.wait(30)
    try:
        yield kept[1]
    finally:
        kept[0].call_soon_threadsafe(ending.set)
        thread.join(30)
        assert not thread.is_alive()


def _unknown() -> Said:
    return said({"error": {"message": "there is no such route", "type": "not_found"}}, 404)


async def _heard(reader: asyncio.StreamReader) -> Heard | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Heard(method, path, headers, json.loads(body) if body else {})


async def _say(answer: Said, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection lives on."""
    chunked = answer.kind == "text/event-stream"
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(answer.body)}"
    head = f"HTTP/1.1 {answer.status} Scripted\r\ncontent-type: {answer.kind}\r\n{length}\r\n"
    writer.write(head.encode() + (b"connection: close\r\n\r\n" if answer.close else b"\r\n"))
    body = answer.body if answer.cut is None else answer.body[: answer.cut]
    size = max(-(-len(body) // answer.pieces), 1)
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
        await writer.drain()
    if answer.hang:
        await reader.read()  # until the client goes
    if answer.cut is not None or answer.hang:
        return False
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return not answer.close
