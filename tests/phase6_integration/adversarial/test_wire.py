"""Class: bytes on an engine's channel that execute, that allocate, or that never end.

Published cases: pickle on ZeroMQ sockets, copied from one engine to the next (CVE-2024-50050, Meta; CVE-2026-3059 and
CVE-2026-3060, SGLang; the class of "ShadowMQ"), a channel that the network can reach (CVE-2025-30202, vLLM). Here the
channel is a pair of sockets without a name, and its bytes are msgpack of a few fixed types. A header that announced
four gigabytes was waited for: the other side collected whatever came, and answered nothing any more.
"""

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.process.messages import HEADER, MAX_FRAME, Frames, FrameTooLargeError, ToEngine, ToFront, frame
from tests.phase6_integration.process.test_messages import TO_ENGINE, TO_FRONT

REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FrameTooLargeError)
SIDES: list[tuple[Callable[[], Frames], list[ToEngine] | list[ToFront]]] = [
    (Frames.for_engine, TO_ENGINE),
    (Frames.for_front, TO_FRONT),
]
LENGTHS = st.integers(0, (1 << 32) - 1).map(lambda length: length.to_bytes(HEADER, "big"))


class Executed:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo executed >&2; kill -9 $PPID",)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def fed(frames: Frames, content: bytes) -> list[object] | None:
    """The messages in these bytes, or None if they are refused. Any other exception is a failure."""
    try:
        return list(frames.feed(content))
    except REFUSED:
        return None


def mutants(messages: list[ToEngine] | list[ToFront]) -> st.SearchStrategy[bytes]:
    """Valid frames with bytes changed, removed and inserted, in a frame of the right length."""

    def mutate(message: ToEngine | ToFront, edits: list[tuple[int, int, bytes]]) -> bytes:
        body = bytearray(frame(message)[HEADER:])
        for at, removed, inserted in edits:
            at %= len(body) + 1
            body[at : at + removed] = inserted
        return framed(bytes(body))

    edits = st.tuples(st.integers(0, 1 << 16), st.integers(0, 4), st.binary(max_size=6))
    return st.builds(mutate, st.sampled_from(messages), st.lists(edits, min_size=1, max_size=4))


@pytest.mark.parametrize("examples", [300, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("side", "messages"), SIDES)
def test_any_bytes_are_messages_or_are_refused(
    side: Callable[[], Frames], messages: list[ToEngine] | list[ToFront], examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.one_of(st.binary(max_size=64).map(framed), mutants(messages), st.binary(max_size=64), LENGTHS))
    def refuses_or_reads(content: bytes) -> None:
        tracemalloc.start()
        fed(side(), content)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20

    refuses_or_reads()


@pytest.mark.parametrize("side", [Frames.for_engine, Frames.for_front])
@pytest.mark.parametrize("length", [MAX_FRAME + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit_is_refused_at_once(side: Callable[[], Frames], length: int) -> None:
    """Whatever follows, and without memory for it."""
    frames = side()
    with pytest.raises(FrameTooLargeError, match=str(length)):
        list(frames.feed(length.to_bytes(HEADER, "big")))


def announced(kind: int, tag: str, at: str, count: int) -> bytes:
    """A message in which five bytes announce billions of items."""
    names = [b"\x82", *(bytes([0xA0 + len(name)]) + name.encode() for name in ("type", tag, at))]
    return b"".join(names) + struct.pack(">BI", kind, count)


FIELDS = ("EngineRequest", "Update", "Dead"), ("prompts", "outputs", "x"), (1 << 16, (1 << 32) - 1)
HOSTILE = {
    "pickles": [pickle.dumps(Executed(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
    **{
        name: [announced(kind, *fields) for fields in product(*FIELDS)]
        for name, kind in {"str": 0xDB, "bin": 0xC6, "array": 0xDD, "map": 0xDF, "ext": 0xC9}.items()
    },
    "nested": [b"\x82\xa4type\xa4Dead\xa1x" + b"\x91" * 200_000],
}


@pytest.mark.parametrize("bodies", HOSTILE.values(), ids=HOSTILE)
def test_what_would_execute_allocate_or_nest_is_refused(bodies: list[bytes]) -> None:
    frames = [framed(body) for body in bodies]
    for side, _ in SIDES:
        tracemalloc.start()
        assert [fed(side(), frame) for frame in frames] == [None] * len(frames)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20
