"""Pieces of a streamed response, a clock for tests, and the names of the figures."""

import json

VLLM_NAMES = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "request_goodput",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p90", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(event: object) -> bytes:
    text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
    return f"{len(text):x}\r\n{text}\r\n".encode()


def word(text: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
