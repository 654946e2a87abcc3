"""Messages arrive whole, in order and once, however the bytes are cut, and sending never blocks."""

import select
import signal
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import FinishReason, SamplingParams
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.messages import (
    Channel,
    Dead,
    EngineRequest,
    Finish,
    Frames,
    LoadModel,
    Ping,
    Pong,
    Progress,
    Ready,
    ToEngine,
    ToFront,
    Update,
    frame,
    to_engine,
    to_front,
)

REQUEST = EngineRequest(
    "chatcmpl-1",
    [(1, 2, 3), (4,)],
    SamplingParams(
        stop=["\n", "END"],
        logit_bias={5: -100.0},
        seed=(1 << 63) - 1,
        logprobs=0,
        allowed_token_ids=[7],
        bad_words=[[5]],
    ),
    [9, 8],
    2,
    -3,
    "salt",
    timeout=3.0,
    client="client",
    arrival=12.5,
)
TO_ENGINE: list[ToEngine] = [LoadModel(EngineOptions(seed=1), "a.b:c"), REQUEST, Finish("x", FinishReason.STOP), Ping()]
TO_FRONT: list[ToFront] = [
    Ready(2048, 100, 16, "cpu", "float32"),
    Update(
        1.0,
        0.001,
        3,
        4,
        [
            Progress("a", 5, admitted=0.5, cached=32),
            Progress("b", 6, more=b"\x93\0"),
            Progress("b", finish_reason=FinishReason.ERROR, error="no"),
        ],
        Gauges(running=3, pages_total=9),
    ),
    Dead("out of memory"),
    Pong(),
]


@pytest.fixture
def no_wait_for_ever() -> Iterator[None]:
    """A channel that waits for a message which never comes is a failure, not a hang."""

    def alarm(*_: object) -> None:
        raise AssertionError("the channel waits for ever")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 30)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_completion_is_a_sample_of_a_prompt_with_its_length_and_a_seed_of_its_own() -> None:
    messages = [*Frames(to_engine).feed(frame(REQUEST))]
    assert messages == [REQUEST], f"one message in one read: {len(messages)} came out"
    (message,) = messages
    made = [message.completion(number) for number in message.numbers]
    assert [request.id for request in made] == [f"chatcmpl-1-{number}" for number in range(4)]
    assert [request.prompt_tokens for request in made] == [(1, 2, 3), (1, 2, 3), (4,), (4,)]
    assert [request.params.max_tokens for request in made] == [9, 9, 8, 8]
    assert [request.params.seed for request in made] == [(1 << 63) - 1, -(1 << 63)] * 2
    assert {(one.priority, one.cache_salt, one.tenant, one.arrival) for one in made} == {(-3, "salt", "client", 12.5)}
    assert made[0].params.logit_bias is made[3].params.logit_bias, "what they share is there once"


@pytest.mark.proof
@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_messages_survive_any_cut(order: list[int], data: st.DataObject) -> None:
    for frames, words in ((Frames(to_engine), TO_ENGINE), (Frames(to_front), TO_FRONT)):
        said = [words[n % len(words)] for n in order]
        whole = b"".join(map(frame, said))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        sizes = [len(piece) for piece in pieces]
        got = [message for piece in pieces for message in frames.feed(piece)]
        assert got == said, (
            f"{len(said)} messages in reads of {sizes} bytes: got {len(got)}, or others, or in another order"
        )


def test_bytes_that_are_no_message_are_refused() -> None:
    wrong = frame(TO_FRONT[0])
    with pytest.raises(msgspec.ValidationError):
        list(Frames(to_engine).feed(wrong))
    bad = msgspec.msgpack.encode({**msgspec.to_builtins(REQUEST), "params": {"temperature": -1}})
    with pytest.raises(msgspec.ValidationError, match="temperature must be a number from 0 to 100"):
        list(Frames(to_engine).feed(len(bad).to_bytes(4, "big") + bad))


def test_a_message_that_was_read_or_refused_is_not_read_again() -> None:
    frames, message = Frames(to_engine), frame(Ping())
    assert next(frames.feed(message * 2)) == Ping(), "the first of two messages in one read"  # the caller stops here
    assert list(frames.feed(b"")) == [Ping()], "the first message was read: the second is next"
    with pytest.raises(msgspec.ValidationError):
        list(frames.feed(frame(TO_FRONT[0])))
    assert list(frames.feed(message)) == [Ping()], "a message that was refused is gone"


@pytest.mark.usefixtures("no_wait_for_ever")
def test_sending_never_blocks_on_a_peer_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        channel.send(Pong())
        assert select.select([ours], [], [], 0)[0], "a message that the socket can take is sent at once"
        assert ours.recv(1 << 16) == frame(Pong())
        words = [Dead(f"{n}" * 1000) for n in range(2000)]  # megabytes: no socket holds them
        for word in words:
            channel.send(word)
        assert channel.receive(wait=False) == []
        ours.sendall(frame(REQUEST))
        assert channel.receive(wait=True) == [REQUEST], "heard, though what was said has not been read"
        frames, heard = Frames(to_front), []
        ours.setblocking(False)
        silent = 0
        while len(heard) < len(words):
            try:
                heard += frames.feed(ours.recv(1 << 16))
            except BlockingIOError:
                silent += 1
                assert silent < 10_000, f"{len(heard)} of {len(words)} messages came: the rest is never sent"
                channel.receive(wait=False)  # an engine passes by here in every step: what fits by now goes out
        assert heard == words


def test_flush_sends_everything() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        channel.send(TO_FRONT[0])
        channel.send(Dead("x"))
        channel.flush()
        assert list(Frames(to_front).feed(ours.recv(1 << 16))) == [TO_FRONT[0], Dead("x")]


@pytest.mark.usefixtures("no_wait_for_ever")
def test_receive_raises_eof_once_the_http_process_has_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(frame(TO_ENGINE[2]))
        ours.close()
        channel = Channel(theirs)
        assert channel.receive(wait=True) == [TO_ENGINE[2]]
        with pytest.raises(EOFError):
            channel.receive(wait=True)
