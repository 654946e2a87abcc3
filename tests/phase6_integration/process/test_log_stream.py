"""LogStream: lines go out in order; what a stalled reader leaves no room for is dropped and counted."""

import os
from collections.abc import Iterator
from queue import Queue

import pytest

from phase6_integration.process.log_stream import CAPACITY, LogStream
from tests.phase6_integration.life import PATIENCE


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read(reader: int, until: bytes) -> bytes:
    data = b""
    while not data.endswith(until):
        data += os.read(reader, 1 << 16)
    return data


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = LogStream(writer)
    for number in range(1000):
        print(f"line {number} \u00e9\udc00", file=stream)
    written = read(reader, b"line 999 \xc3\xa9\\udc00\n")
    assert written.decode().splitlines() == [f"line {number} \u00e9\\udc00" for number in range(1000)]
    assert stream.drain(PATIENCE)
    assert stream.dropped == 0
    assert not stream.isatty()


def test_a_write_never_blocks_and_dropped_lines_are_reported_once_there_is_a_reader(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    reports: Queue[int] = Queue()
    stream = LogStream(writer, reports.put)
    line, lines = "x" * 99 + "\n", 2 * CAPACITY // 100
    for _ in range(lines):
        stream.write(line)
    assert lines // 3 < stream.dropped < lines
    assert not stream.drain(0)
    left = 100 * (lines - stream.dropped)
    while left:
        left -= len(os.read(reader, 1 << 16))
    reported = 0
    while reported < stream.dropped:
        reported += reports.get(timeout=PATIENCE)
    assert reported == stream.dropped
    assert stream.drain(PATIENCE)


def test_a_pipe_that_another_process_made_non_blocking_loses_no_line(pipe: tuple[int, int]) -> None:
    """The flag belongs to the pipe, not to a process: supervisors that share it set it."""
    reader, writer = pipe
    os.set_blocking(writer, False)
    stream = LogStream(writer)
    lines = [f"line {number:094}\n" for number in range(3000)]  # more than a pipe holds
    for line in lines:
        stream.write(line)
    assert read(reader, lines[-1].encode()).decode() == "".join(lines)
    assert stream.drain(PATIENCE)
    assert stream.dropped == 0


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = LogStream(writer)
    print("nothing reads this", file=stream)
    assert stream.drain(PATIENCE)
    os.close(writer)
