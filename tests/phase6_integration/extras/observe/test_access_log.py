"""The lines of the log about requests: one each, with tokens and times, also for faults and clients that left."""

import asyncio
import json
import logging
import re
import sys
from typing import Any

import pytest

from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer
from phase6_integration import logs
from phase6_integration.api.errors import bad_value, unavailable
from phase6_integration.api.settings import ServerSettings
from phase6_integration.cli.terminal import HumanFormatter
from phase6_integration.logs import JsonFormatter, LogfmtFormatter
from phase6_integration.process.health import Health
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.life import logfmt
from tests.phase6_integration.middleware_app import JSON, KEYS, App, access_lines, call
from tests.phase6_integration.posting import post

START = {"type": "http.response.start", "status": 200, "headers": []}


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_a_fault_of_ours_tells_its_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError("at 0x7f00 in /secret/place.py")

    response = call(App(fails), headers=[(b"x-request-id", b"it")])
    assert response.status == 500
    assert "it" in response.error["message"]
    assert not re.search("secret|0x|Runtime|place", response.body.decode())
    assert response.headers["x-request-id"] == "it"
    assert "/secret/place.py" in caplog.text
    assert [line["status"] for line in access_lines(caplog)] == [500]


def test_a_fault_in_the_middle_of_an_answer_leaves_it_incomplete(caplog: pytest.LogCaptureFixture) -> None:
    """The status has been sent: the server cuts the connection when a response is left open."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("mid-stream")

    response = call(App(fails))
    assert (response.status, response.body) == (200, b"half")
    assert "mid-stream" in caplog.text
    assert access_lines(caplog)[0]["status"] == 499


@pytest.mark.parametrize("started", [False, True])
def test_a_request_that_outlasts_the_server_is_one_line(caplog: pytest.LogCaptureFixture, started: bool) -> None:
    async def is_cancelled(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send(START)
        raise asyncio.CancelledError

    assert call(App(is_cancelled)).status == (200 if started else 503)
    (line,) = (record for record in caplog.records if record.name == "nanoserve")
    assert line.exc_info is None
    assert "end of the server" in line.message


def test_polled_routes_are_logged_only_when_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    async def loads(scope: Any, receive: Any, send: Any) -> None:
        raise unavailable(Health.LOADING)

    for path in ("/health", "/ping", "/load", "/metrics", "/stats"):
        caplog.clear()
        call(App(), path, method="GET")
        call(App(), f"/llm{path}", method="GET", root_path="/llm")
        call(App(), path, method="GET", max_headers=1, headers=[(b"a", b"b")])
        call(App(loads), path, method="GET")
        levels = [(r.levelname, vars(r)["fields"]["status"]) for r in caplog.records if r.name == "nanoserve.access"]
        assert levels == [("DEBUG", 200), ("DEBUG", 200), ("INFO", 431), ("DEBUG", 503)]


def test_the_line_of_a_refused_request_has_its_code_and_field(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        raise bad_value("temperature", "too hot")

    call(App(refuses))
    call(App(), max_headers=1, headers=[(b"a", b"b")])
    call(App(), api_keys=KEYS)
    call(App(), headers=[JSON, (b"content-length", b"11")], pieces=[], max_body_bytes=10)
    assert [(line["status"], line["code"], line.get("param")) for line in access_lines(caplog)] == [
        (400, "invalid_value", "temperature"),
        (431, "headers_too_large", None),
        (401, "invalid_api_key", None),
        (413, "body_too_large", None),
    ]


def test_one_line_a_request_with_its_tokens_and_times(caplog: pytest.LogCaptureFixture) -> None:
    """The cached tokens of a prompt count once, whatever n is, and of the times the first."""
    engine = FakeEngine()
    engine.cached = 1
    asked = {"prompt": ["Hello there", "Hello you"], "n": 3, "max_tokens": 1, "user": "me", "request_id": "mine"}
    post("/v1/completions", asked, engine, headers={"x-request-id": "it"})
    (line,) = access_lines(caplog)
    assert 0 <= line.pop("queue") <= line.pop("ttft") <= line.pop("total")
    assert line == {
        "id": "it",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": sum(len(Tokenizer.from_pretrained().encode(prompt)) for prompt in asked["prompt"]),
        "cached_tokens": 2,
        "generated_tokens": 6,
        "finish_reason": "length",
        "user": "me",
        "request_id": "mine",
    }


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.ERROR, "a reason that no client may see"),
        (FinishReason.TIMEOUT, "the request was not answered before its deadline"),
    ],
)
def test_the_line_of_a_failed_answer_has_the_error(
    caplog: pytest.LogCaptureFixture, reason: FinishReason, error: str
) -> None:
    post("/v1/completions", {"prompt": "Hello"}, FakeEngine(lambda _: [reason]))
    assert [line["error"] for line in access_lines(caplog)] == [error]


def test_a_client_that_left_is_a_499_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def waits(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    assert call(App(waits), leaves=True).status == 0
    assert access_lines(caplog)[0]["status"] == 499


def test_a_path_begins_no_line_and_shows_no_query(caplog: pytest.LogCaptureFixture) -> None:
    call(App(), "/v1/%0AINFO%20forged" + "x" * 500)
    (record,) = (record for record in caplog.records if record.name == "nanoserve.access")
    line = LogfmtFormatter().format(record)
    assert "\n" not in line
    assert "/v1/%0AINFO%20forged" in line
    assert len(line) < 400


def test_a_line_is_one_line_for_people_and_pairs_or_one_object_for_machines() -> None:
    record = logging.LogRecord("nanoserve", logging.INFO, "", 0, "request", None, None)
    record.fields = {
        "id": "x\ny",
        "total": 0.25,
        "why": "two words",
        "name": "",
        "sum": 'a="b"',
        "path": "/\u00e9\u2028",
    }
    human, pairs, machine = (kind().format(record) for kind in (HumanFormatter, LogfmtFormatter, JsonFormatter))
    fields = r'id="x\ny" total=0.250s why="two words" name="" sum="a=\"b\"" path="/\u00e9\u2028"'
    assert re.fullmatch(rf"\d\d:\d\d:\d\d info    request {re.escape(fields)}", human)
    read = json.loads(machine)
    head = {"time": read.pop("time"), "level": "info", "logger": "nanoserve", "message": "request"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", head["time"])
    assert {"time": head["time"], **read} == {**head, **record.fields}
    assert logfmt(pairs) == {**head, **record.fields, "total": "0.250s"}


def test_an_exception_is_in_the_line_of_its_record() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("nanoserve", logging.ERROR, "", 0, "a request failed", None, sys.exc_info())
    line = LogfmtFormatter().format(record)
    assert "\n" not in line
    assert logfmt(line)["exception"].endswith("ValueError: two\nlines")


def test_the_text_of_a_terminal_needs_the_formatter_of_the_command_line() -> None:
    with pytest.raises(ValueError, match="in a program it is 'logfmt' or 'json'"):
        logs.configure(ServerSettings(log_format="human"))
