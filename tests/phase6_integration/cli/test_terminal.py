"""What a person reads on a terminal: the banner of a server, and answers that are wrapped at words."""

import io
import logging

import pytest

from phase6_integration.cli.terminal import HumanFormatter, Wrapping

READY = {
    "url": "http://127.0.0.1:8000",
    "model": "tiny_chat",
    "max_model_len": 832,
    "pages": 52,
    "page_size": 16,
    "device": "cpu",
    "dtype": "bfloat16",
    "kv_cache_bytes": 2**21,
    "after": 3.21,
}


def record(message: str, fields: dict[str, object]) -> logging.LogRecord:
    made = logging.LogRecord("nanoserve", logging.INFO, "", 0, message, None, None)
    made.fields = fields
    return made


def test_a_server_says_on_a_terminal_what_to_open_and_what_it_has() -> None:
    ready = record("ready", dict(READY))
    lines = HumanFormatter().format(ready).splitlines()
    assert lines[0].endswith("ready in 3.2 s")
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[2:] if line}
    assert said == {
        "open": "http://127.0.0.1:8000 in a browser: a chat, and the engine step by step",
        "API": "http://127.0.0.1:8000/v1, as OpenAI's; also /v1/messages, /api/chat",
        "model": "tiny_chat, bfloat16 on cpu, up to 832 tokens",
        "memory": "52 pages of 16 tokens, 2 MiB",
        "stop": "Ctrl-C",
    }


def test_other_lines_stay_as_they_are() -> None:
    loading = record("loading", {"model": "x"})
    assert HumanFormatter().format(loading).endswith("loading model=x")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_is_wrapped_at_words_however_its_parts_come(size: int) -> None:
    text, out = (
        "A page holds the keys\n  and values of 16 tokens.\n\nUnbreakable-word-here \u6f22\u5b57\u6f22 end",
        io.StringIO(),
    )
    wrapping = Wrapping(out, 12)
    for start in range(0, len(text), size):
        wrapping.write(text[start : start + size])
    wrapping.end()
    assert out.getvalue().split("\n") == [
        *("A page holds", "the keys", "  and values", "of 16", "tokens.", ""),
        *("Unbreakable-word-here", "\u6f22\u5b57\u6f22 end"),
    ]
