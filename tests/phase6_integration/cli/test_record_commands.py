"""`nanoserve record`, `replay` and `trace`, and `generate --record`."""

import base64
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL

import httpx2
import pytest

from phase5_continuous.extras.record import record_file
from phase5_continuous.extras.record.record_file import encoded, open_record, read
from phase5_continuous.extras.record.replay import Replay
from phase6_integration.cli.common import body_of, lines_of
from phase6_integration.cli.main import main
from phase6_integration.cli.record_command import lines, write
from tests.phase6_integration.life import ROOT

HEAD = b'{"record": 1, "page_size": 4}\n'
SAMPLE = Path(__file__).parents[2] / "data" / "record.jsonl.gz"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that sends the sample and then nothing, until it is shut down; to other paths an error."""
    ends = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/record" or self.headers["authorization"] != "Bearer key":
                body = json.dumps({"error": {"message": "a key is needed"}}).encode()
                self.send_response(401)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_response(200)
            self.end_headers()
            for line in gzip.decompress(SAMPLE.read_bytes()).splitlines():
                self.wfile.write(b": a comment\n\ndata: %s\n\n" % line)
            self.wfile.flush()
            ends.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    ends.set()
    made.shutdown()
    made.server_close()


def test_a_record_of_a_server_has_its_lines_and_ends_after_the_seconds(server: str, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    assert main(["record", str(file), "--url", server, "--api-key", "key", "--seconds", "0.5"]) == 0
    assert [*read(file)] == [*read(SAMPLE)]


def test_an_interrupt_in_the_middle_of_a_line_does_not_damage_the_file(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = zlib.crc32

    def interrupted(data: bytes, value: int = 0) -> int:
        if data and threading.current_thread() is threading.main_thread():  # the server reads such a file too
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return checksum(data, value)

    monkeypatch.setattr(zlib, "crc32", interrupted)
    file = tmp_path / "run.jsonl.gz"
    assert main(["record", str(file), "--url", server, "--api-key", "key"]) == 0
    written = [*read(file)]
    assert 0 < len(written) < len(whole := [*read(SAMPLE)])
    assert written == whole[: len(written)]


@pytest.mark.parametrize("name", ["run.jsonl.gz", "run.jsonl"])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_record_can_be_replayed_whatever_has_ended_the_command(
    ending: signal.Signals, name: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM left the half of a compressed file, or an empty one."""
    file, whole = tmp_path / name, [*read(SAMPLE)]
    command = ["record", str(file), "--url", server, "--api-key", "key"]
    screen, terminal = os.openpty()
    with (
        open(screen, "rb", buffering=0) as shown,
        subprocess.Popen(
            [sys.executable, "-m", "phase6_integration.cli", *command], cwd=ROOT, stdout=DEVNULL, stderr=terminal
        ) as recording,
    ):
        os.close(terminal)
        said = b""
        while b"%d lines" % len(whole) not in said:  # it shows a line once that is written
            said += shown.read(1 << 16)
        recording.send_signal(ending)
        recording.wait()
    written = [*read(file)]
    assert written == whole[: len(written)]
    assert len(written) >= (len(whole) if ending == signal.SIGTERM else 1)
    assert main(["replay", str(file), "-o", str(tmp_path / "made")]) == 0
    assert ("is cut off" in capsys.readouterr().err) <= (ending == signal.SIGKILL)


def test_a_line_is_in_the_file_a_second_later_while_more_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0, 0.0, 0.5, 1.0, 1.0]  # the first line and the last one ask twice: they are flushed
    monkeypatch.setattr(record_file, "monotonic", lambda: times.pop(0))
    with open_record(file := tmp_path / "run.jsonl.gz") as written:
        for number in range(3):
            write(written, encoded({"record": number}))
        assert len([*read(file)]) == 3


def test_a_comment_of_the_server_is_an_empty_line() -> None:
    """It says that nothing has happened: what has come is flushed."""
    sent = httpx2.MockTransport(lambda _: httpx2.Response(200, content=b"data: {}\n\n: \n\ndata: []\n\n"))
    with httpx2.Client(transport=sent).stream("GET", "http://server/record") as response:
        assert [*lines(response, None)] == ["{}", "", "[]"]


def test_what_came_before_a_silence_is_in_the_file(tmp_path: Path) -> None:
    """Even if it came within a second after a flush."""
    file = tmp_path / "run.jsonl.gz"
    with open_record(file) as written:
        for number in range(3):
            write(written, encoded({"record": number}))
        write(written, "")
        assert len([*read(file)]) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_that_is_cut_off_anywhere_has_the_lines_that_are_whole(packed: bool, tmp_path: Path) -> None:
    """It never has one that is not, and a warning names the last one."""
    file = tmp_path / ("run.jsonl.gz" if packed else "run.jsonl")
    content, whole = SAMPLE.read_bytes(), [*read(SAMPLE)]
    content = content if packed else gzip.decompress(content)
    for length in range(len(content) // 4, len(content), 997):
        file.write_bytes(content[:length])
        warned: list[str] = []
        kept = [*read(file, warned.append)]
        assert kept == whole[: len(kept)] != whole
        assert all(words.endswith(f"up to line {len(kept)}") for words in warned)
        assert warned or not packed


@pytest.mark.parametrize("command", ["replay", "trace"])
def test_a_record_that_is_cut_off_is_shown_with_a_warning(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Browsers refuse a compressed file without its end: the page has one that is whole, of the lines that are."""
    file, made = tmp_path / "run.jsonl.gz", tmp_path / "made"
    file.write_bytes(SAMPLE.read_bytes()[:9000])
    assert main([command, str(file), "-o", str(made)]) == 0
    assert capsys.readouterr().err.startswith(f"nanoserve {command}: {file} is cut off")
    if command == "replay":
        (content,) = re.findall('<script type="application/gzip"[^>]*>([^<]*)', made.read_text("utf-8"))
        shown = [json.loads(line) for line in gzip.decompress(base64.b64decode(content)).splitlines()]
        assert shown == [*read(file)]


def test_a_record_with_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    """It is not taken for one that is cut off."""
    file, content = tmp_path / "run.jsonl.gz", SAMPLE.read_bytes()
    for place in range(100, len(content), 499):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        with pytest.raises((ValueError, OSError)):
            deque(read(file), maxlen=0)


def test_an_error_of_the_server_is_shown_and_leaves_no_file(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(tmp_path / "run"), "--url", server, "--api-key", "wrong"]) == 1
    assert capsys.readouterr().err == "nanoserve record: the server answers 401: a key is needed\n"
    assert not (tmp_path / "run").exists()


def test_generate_records_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "What is a page?", "--record", str(tmp_path / "run.jsonl")]) == 0
    replay, texts = Replay(), dict[str, str]()
    for line in read(tmp_path / "run.jsonl"):
        replay.apply(line)
        texts |= line.get("vocab", {})
    (request,) = replay.requests.values()
    output = "".join(texts[str(token)] for token in request.tokens[request.prompt :])
    assert output.removesuffix("<|im_end|>").strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", ["replay", "trace"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.jsonl", b"{}\n", "line 1 does not belong to one"),
        ("run.jsonl", b"3\n", "line 1 does not belong to one"),
        ("run.jsonl", b"", "it is empty"),
        ("run.jsonl", b'{"record": 99}\n', "version 99; only 1 can be read"),
        ("run.jsonl", b'{"record": 1, "page_size": 4}\n{"pages": [["free", 3]]}\n', "line 2 does not follow"),
        ("run.jsonl", HEAD + b'{"pages": [["_setattr__", "line", 1]]}\n', "no operation is named '_setattr__'"),
        ("run.jsonl", HEAD + b'{"t": "soon"}\n', "t must be a number from 0, got 'soon'"),
        ("run.jsonl", HEAD + b'{"step": 1, "t": 0, "ms": [1]}\n', "line 2 does not follow"),
        ("run.jsonl", HEAD + b'{"step": 1, "t": 0, "ms": [1, 1, NaN, 1]}\n', "ms must be a number from 0, got nan"),
        ("run.jsonl", HEAD + b'{"step": {}, "t": 0, "ms": [1, 1, 1, 1]}\n', "step must be an integer from 0, got {}"),
        ("run.jsonl", HEAD + b'{"new": ' + b"[" * 200_000 + b"\n", "is damaged, or not a record, in line 2"),
        ("run.jsonl", b"a poem\n", "Expecting value"),
        ("run.jsonl.gz", SAMPLE.read_bytes()[:100], "or cut off in its first line"),
        ("run.jsonl.gz", SAMPLE.read_bytes()[:5000] + b"\xff" * 99, "while decompressing"),
    ],
)
def test_what_is_no_record_or_damaged_is_said_and_nothing_is_made_of_it(
    command: str, name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / name, tmp_path / "made"
    file.write_bytes(content)
    assert main([command, str(file), "-o", str(made)]) == 1
    assert words in capsys.readouterr().err
    assert not made.exists()


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "MAX_LINE", 1000)
    (file := tmp_path / "run.jsonl.gz").write_bytes(gzip.compress(HEAD + b" " * 5000 + b"{}\n"))
    assert main(["replay", str(file), "-o", str(tmp_path / "made")]) == 1
    assert "line 2 has more than 1000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("status", [200, 500])
def test_a_server_that_never_ends_a_line_is_left(status: int) -> None:
    """After 99 kB of an answer that has no end."""
    endless = httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(status, content=itertools.repeat(b"x" * 33_000)))
    )
    with (
        endless.stream("GET", "http://server/") as response,
        pytest.raises(ValueError, match="of more than 90000 bytes"),
    ):
        body_of(response, 90_000) if status == 500 else [*lines_of(response, 90_000)]


def test_a_trace_has_the_format_that_viewers_document(tmp_path: Path) -> None:
    """Complete events with a time and a length, names of threads, and in each lane no two that overlap and are not
    nested: Perfetto would drop one. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    made = tmp_path / "trace.json"
    assert main(["trace", str(SAMPLE), "-o", str(made)]) == 0
    events = json.loads(made.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M", "C", "i"}
    assert all(type(event[key]) is int for event in events for key in ("pid", "tid"))
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M")
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for spans in lanes.values():
        ends: list[float] = []
        for start, length, name in sorted(spans):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - length <= ends[-1] + 1e-6, name
            ends.append(start - length)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert lanes.keys() <= named


def test_a_lane_of_a_trace_has_a_request_at_a_time_and_is_used_again(tmp_path: Path) -> None:
    assert main(["trace", str(SAMPLE), "-o", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    replay, most, alive = Replay(), 0, 0
    for line in read(SAMPLE):
        replay.apply(line)
        alive += len(line.get("new", ()))
        most, alive = max(most, alive), alive - len(line.get("done", ()))
    requests = [event for event in events if event["ph"] == "X" and "end" in event["args"]]
    assert {event["name"] for event in requests} == {request.id for request in replay.requests.values()}
    assert {event["tid"] for event in requests} == set(range(1, most + 1))
    assert len(requests) > most
    assert sum(event["args"]["output tokens"] for event in requests) == sum(r.output for r in replay.requests.values())
    for lane in range(1, most + 1):
        of_lane = sorted((event["ts"], event["ts"] + event["dur"]) for event in requests if event["tid"] == lane)
        assert all(end <= start for (_, end), (start, _) in pairwise(of_lane))
