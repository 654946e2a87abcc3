"""A server that sends scripted responses, for tests of clients. It keeps the requests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


MODELS = said({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
UNKNOWN = said({"error": {"message": "there is no such route", "type": "not_found"}}, 404)


class Scripted(ThreadingHTTPServer):
    """`answer` decides. GET /v1/models is answered with `tiny` unless it does."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Heard], Said | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.heard: list[Heard] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def asked(self) -> list[Heard]:
        return [heard for heard in self.heard if heard.method == "POST"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Body) -> None:
        heard = Heard(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        self.server.heard.append(heard)
        answer = self.server.answer(heard) or (MODELS if heard.path == "/v1/models" else UNKNOWN)
        with suppress(ConnectionError):
            self._say(answer)

    def _say(self, answer: Said) -> None:
        chunked, whole = answer.kind == "text/event-stream", answer.cut is None and not answer.hang
        self.send_response(answer.status)
        self.send_header("content-type", answer.kind)
        if chunked:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("content-length", f"{len(answer.body)}")
        if answer.close:
            self.send_header("connection", "close")
        self.end_headers()
        body = answer.body[: answer.cut]
        size = max(-(-len(body) // answer.pieces), 1)
        for start in range(0, len(body), size):
            piece = body[start : start + size]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
        if chunked and whole:
            self.wfile.write(b"0\r\n\r\n")
        if answer.hang:
            self.rfile.read(1)  # until the client goes
        self.close_connection = answer.close or not whole


@contextmanager
def scripted(answer: Callable[[Heard], Said | None]) -> Iterator[Scripted]:
    """On a free port of this machine, in a thread."""
    with Scripted(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
