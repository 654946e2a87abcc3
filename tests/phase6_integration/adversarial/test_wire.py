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
from collections.abc import Callable, Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase6_integration.process.messages import (
    HEADER,
    MAX_FRAME,
    Frames,
    FrameTooLargeError,
    ToEngine,
    ToFront,
    frame,
    to_engine,
    to_front,
)
from tests.phase6_integration.process.test_messages import TO_ENGINE, TO_FRONT

REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FrameTooLargeError)
DECODERS = {"to the engine": (to_engine, TO_ENGINE), "from the engine": (to_front, TO_FRONT)}
SIDES = pytest.mark.parametrize("side", DECODERS)
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


def mutants(messages: Sequence[ToEngine | ToFront]) -> st.SearchStrategy[bytes]:
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
@SIDES
def test_any_bytes_are_messages_or_are_refused(side: str, examples: int) -> None:
    decoder, messages = DECODERS[side]

    @settings(max_examples=examples, deadline=None)
    @given(st.one_of(st.binary(max_size=64).map(framed), mutants(messages), st.binary(max_size=64), LENGTHS))
    def refuses_or_reads(content: bytes) -> None:
        tracemalloc.start()
        fed(Frames(decoder), content)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20

    refuses_or_reads()


@SIDES
@pytest.mark.parametrize("length", [MAX_FRAME + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit_is_refused_at_once(side: str, length: int) -> None:
    """Whatever follows, and without memory for it."""
    frames = Frames(DECODERS[side][0])
    with pytest.raises(FrameTooLargeError, match=str(length)):
        list(frames.feed(length.to_bytes(HEADER, "big")))


@SIDES
def test_nothing_on_the_channel_is_executed(side: str) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert fed(Frames(DECODERS[side][0]), framed(pickle.dumps(Executed(), protocol))) is None


@pytest.mark.parametrize("kind", [0xDB, 0xC6, 0xDD, 0xDF, 0xC9], ids=["str", "bin", "array", "map", "ext"])
def test_a_count_that_is_not_there_allocates_nothing(kind: int) -> None:
    """Five bytes announce four billion items."""
    for tag, at, count in product(
        ("EngineRequest", "Update", "Dead"), ("prompts", "progress", "x"), (1 << 16, (1 << 32) - 1)
    ):
        names = [b"\x82", *(bytes([0xA0 + len(name)]) + name.encode() for name in ("type", tag, at))]
        tracemalloc.start()
        for decoder, _ in DECODERS.values():
            assert fed(Frames(decoder), framed(b"".join(names) + struct.pack(">BI", kind, count))) is None
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_values_nested_without_end_are_refused() -> None:
    for decoder, _ in DECODERS.values():
        assert fed(Frames(decoder), framed(b"\x82\xa4type\xa4Dead\xa1x" + b"\x91" * 200_000)) is None
