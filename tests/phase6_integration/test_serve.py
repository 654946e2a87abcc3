"""`nanoserve serve` from its beginning to its exit code, as a process and from outside."""

import errno
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase6_integration import serve
from phase6_integration.api.settings import ServerSettings
from phase6_integration.cli.main import main
from phase6_integration.engine.options import EngineOptions
from tests.phase6_integration.life import PATIENCE, gone, life, logfmt, scripted, values

# Beginnings.


def refusal(*arguments: str) -> list[str]:
    """What a server that cannot start says before it exits with 1."""
    with life(*arguments) as server:
        assert server.ended() == 1
    assert not [line for line in server.lines if "Traceback" in line]
    return [logfmt(line)["message"] for line in server.lines]


def test_what_prevents_a_start_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = f"cannot listen on 127.0.0.1 port {port}: {os.strerror(errno.EADDRINUSE)}"
        assert refusal("--port", str(port)) == [why]
    assert refusal("--host", "..") == ["cannot listen on .. port 0: this is not the name of a host"]
    source, error = refusal(str(tmp_path))
    assert "the model is a directory" in source
    assert str(tmp_path) in error
    assert refusal("--device", "cuda")[-1].startswith("device ")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for command in (["generate", "Hello"], ["chat"]):
        assert main([*command, "--device", "cuda:99"]) == 1
        assert re.fullmatch(rf"nanoserve {command[0]}: .*device .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_ctrl_c_is_one_line_and_exit_code_130(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    for place in ("serve.serve", "cli.doctor_command.findings"):
        monkeypatch.setattr(f"phase6_integration.{place}", interrupted)
    assert main([command]) == 130
    assert capsys.readouterr().err == f"nanoserve {command}: stopped\n"


def test_while_it_loads_it_answers_503() -> None:
    with life(scripted=True) as server:
        url = server.listening()
        asked = [httpx2.get(f"{url}{path}") for path in ("/health", "/health/ready")]
        for response in (*asked, httpx2.post(f"{url}/v1/completions", json={"prompt": "a"})):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["code"] == "loading"
        assert httpx2.get(f"{url}/health/live").json() == {"status": "live"}, "no reason to restart it"
        assert httpx2.get(f"{url}/version").status_code == 200
        server.signal(signal.SIGUSR1)
        server.until("ready")
        ready = httpx2.get(f"{url}/health")
        assert ready.json() == {"status": "ready"}
        assert "server" not in ready.headers, "it does not say what it is made with"


def test_a_signal_while_it_imports_ends_it() -> None:
    with life(scripted=True, first="serve._Lifecycle._server = lambda _: threading.Event().wait()") as server:
        server.until("loading")
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    assert server.lines[-1].endswith("stopped at_once=False")


def test_a_signal_while_the_real_engine_loads_ends_both() -> None:
    with life() as server:
        server.listening()
        (engine,) = server.engines()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    assert gone(engine)


# Ends.


def test_while_draining_health_is_503_and_running_requests_are_completed() -> None:
    with scripted() as (server, url), httpx2.Client(timeout=PATIENCE) as http:
        with http.stream("POST", f"{url}/v1/completions", json=STREAM) as asked:
            lines = asked.iter_lines()
            server.signal(signal.SIGTERM)
            server.until("draining")
            for response in (http.get(f"{url}/health"), http.post(f"{url}/v1/completions", json={"prompt": "a"})):
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) > 0
                assert response.json()["error"]["code"] == "draining"
            server.signal(signal.SIGUSR1)
            told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert told[-1] == "[DONE]"
        assert [c["finish_reason"] for c in choices(told)][-1] == "length"
        assert server.ended() == 0
        with pytest.raises(httpx2.ConnectError):
            http.get(f"{url}/health")


STREAM = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}  # tokens: no process that tokenizes is started


def choices(events: list[str]) -> list[dict[str, Any]]:
    return [choice for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_answers_that_outlast_the_timeout_end_in_an_error_and_the_server_in_order(number: int, code: int) -> None:
    """Of a stream the last event is an error; an answer in one piece is a 503."""
    with scripted("--shutdown-timeout", "0.2") as (server, url), httpx2.Client(timeout=PATIENCE) as http:
        with (
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE) as asking,
            http.stream("POST", f"{url}/v1/completions", json=STREAM) as asked,
        ):
            lines = asked.iter_lines()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 15\r\n"
            )
            asking.sendall(head + b'\r\n{"prompt": [5]}')
            assert httpx2.get(f"{url}/health").status_code == 200  # by now that request has been read
            server.signal(number)
            told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert asking.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert json.loads(told[-2])["error"]["code"] == "draining"
        assert told[-1] == "[DONE]"
        assert server.ended() == code
    assert values(server.lines, "finish_reason") == ["error", "error"]


def test_a_second_signal_ends_it_at_once() -> None:
    with (
        scripted("--shutdown-timeout", "1000") as (server, url),
        httpx2.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=PATIENCE),
    ):
        server.signal(signal.SIGTERM)
        server.until("draining")
        server.signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM


# Logs.


@pytest.mark.parametrize(("flags", "read"), [((), logfmt), (("--log-format", "json"), json.loads)])
def test_a_log_off_a_terminal_can_be_parsed_to_the_last_line_and_a_key_of_the_environment_is_in_none(
    flags: tuple[str, ...], read: Callable[[str], dict[str, Any]]
) -> None:
    with scripted(*flags, NANOSERVE_API_KEY="sk-hidden") as (server, url):
        keys = ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Bearer sk-hidden"})
        asked = [httpx2.get(f"{url}/v1/models", headers={**key, "x-request-id": "mine"}) for key in keys]
        assert httpx2.get(f"{url}/stats", headers=keys[2]).status_code == 200
        assert [response.status_code for response in asked] == [401, 401, 200]
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as bad:
            bad.sendall(b"GARBAGE\r\n\r\n")
            assert bad.recv(65536)
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    lines = [read(line) for line in server.lines]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    assert lines[-1]["message"] == "stopped"
    mine = [(line["method"], line["path"], int(line["status"])) for line in lines if line.get("id") == "mine"]
    assert mine == [("GET", "/v1/models", status) for status in (401, 401, 200)]
    answered = [int(line["status"]) for line in lines if "status" in line]
    assert answered == [401, 401, 200, 400], "what a playground polls is logged only if it fails, a bad request once"
    assert not [line for line in server.lines if "sk-hidden" in line or "sk-wrong" in line]


# With an engine process.


def test_if_the_server_is_killed_its_engine_ends_too() -> None:
    with life(factory="faults:light") as server:
        server.listening()
        server.until("ready")
        (engine,) = server.engines()
        descriptor = os.pidfd_open(engine)
        server.process.kill()
        import select

        watch = select.poll()
        watch.register(descriptor, select.POLLIN)
        assert watch.poll(PATIENCE * 1000)
        os.close(descriptor)


def test_too_few_files_for_a_single_connection_are_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "max_open_files", lambda: serve.SPARE_FILES)
    monkeypatch.delattr(serve, "listen")  # it comes before any connection
    said: list[object] = []
    monkeypatch.setattr(serve, "_failed", lambda error: said.append(error) or 1)
    assert serve.serve(EngineOptions(), ServerSettings(port=0)) == 1
    assert "at most 64 files may be open" in str(said[0])
    assert "ulimit -n" in str(said[0])
