"""The processes that follow grammars: a parent that has the vocabulary, and a child for each client of the server.

A grammar is a program that a client sends. It may take seconds to compile, gigabytes to follow, or overflow the stack
of llguidance. So it runs in a child, which the kernel ends at a limit of memory or of processor time, and which only
its client waits for. A child is forked in milliseconds from a parent that has the vocabulary in memory.

    engine -> Open, Take, Ask, Drop -> Constraint (phase 2) -> Follows, Mask -> engine
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from phase0_request.batch import Forced
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.sampling.constraints import Constraint, Grammars, fill_masks
from phase6_integration.process.messages import CHUNK, Frames, frame
from phase6_integration.process.tokenizer_process import limit_memory

MEMORY = 512 << 20  # bytes that a child may allocate beyond what its parent has
GROWN = 192 << 20  # bytes after which it ends between two messages: another one begins without what this one has kept
OPENING = 2.0  # seconds of processor time to compile a grammar
FOLLOWING, EACH = 0.25, 0.01  # and to follow some: for all, and for each more
NICENESS = 10  # the model comes first


class Open(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a child: constrain an output that begins with these tokens. Its answer is the mask of the next one."""

    key: int  # of the request, for its life
    serial: int  # of the message, for its answer
    params: SamplingParams
    tokens: list[int]


class Take(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a child: output token `index` was drawn. Its answers are what follows in any case, and the mask after that."""

    key: int
    serial: int
    index: int
    token: int


class Ask(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a child: make the mask of output token `index`, and forget what was taken from there on."""

    key: int
    serial: int
    index: int


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a child: the request has ended."""

    key: int


class ChildReady(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child, first: it is there, and what ends it from now on is a message."""

    pid: int


class Follows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child: the tokens that follow the one that was taken in any case, and whether the output ends there."""

    key: int
    serial: int
    tokens: list[int]
    ends: bool


class Mask(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child: the mask of output token `index`, or why there is none. Always the answer to the last message about
    a request."""

    key: int
    serial: int
    index: int
    bits: bytes
    error: str | None = None


class CpuTime(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child, after the answers to some messages: the processor time that they took."""

    seconds: float


class Leaving(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child, last: it has grown too large. What it has not answered is to be sent to another one."""


ToChild = Open | Take | Ask | Drop
FromChild = ChildReady | Follows | Mask | CpuTime | Leaving
to_child: "msgspec.msgpack.Decoder[ToChild]" = msgspec.msgpack.Decoder(ToChild)
from_child: "msgspec.msgpack.Decoder[FromChild]" = msgspec.msgpack.Decoder(FromChild)


class Child:
    """Follows the grammars of one client."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._constraints: dict[int, Constraint | str] = {}  # or why there is none

    def answer(self, messages: list[ToChild]) -> tuple[list[FromChild], Callable[[], list[FromChild]]]:
        """The answers to some messages: what follows the tokens that were taken; and a function that makes the masks of
        all requests together."""
        answers: list[FromChild] = []
        wanted: dict[int, tuple[int, int]] = {}  # the serial and the index of the mask, by key
        for message in messages:
            key = message.key
            match message:
                case Open(serial=serial, params=params, tokens=tokens):
                    self._constraints[key] = self._open(params, tokens)
                    wanted[key] = serial, len(tokens)
                case Take(serial=serial, index=index, token=token):
                    constraint = self._constraints[key]
                    if isinstance(constraint, Constraint):
                        constraint.take(index, token)
                        forced = constraint.forced(index) or Forced()
                        answers.append(Follows(key, serial, [*forced.tokens], forced.ends))
                        index += len(forced.tokens)
                    wanted[key] = serial, index + 1
                case Ask(serial=serial, index=index):
                    wanted[key] = serial, index
                case Drop():
                    self._constraints.pop(key, None)
                    if key in wanted:
                        answers.append(Mask(key, *wanted.pop(key), b""))
        rows = []
        for key, (serial, index) in wanted.items():
            constraint = self._constraints[key]
            if isinstance(constraint, Constraint):
                rows.append((key, serial, index, constraint))
            else:
                answers.append(Mask(key, serial, index, b"", constraint))

        def masks() -> list[FromChild]:
            made = fill_masks([(constraint, index) for _, _, index, constraint in rows], self._vocab_size)
            return [
                Mask(key, serial, index, bits.tobytes(), constraint.error)
                for (key, serial, index, constraint), bits in zip(rows, made, strict=True)
            ]

        return answers, masks

    def _open(self, params: SamplingParams, tokens: list[int]) -> Constraint | str:
        """A constraint that has followed some tokens, of which none counts as committed. Or why there is none."""
        try:
            constraint = Constraint(Request("", (0,), params), self._vocab_size, self._grammars)
        except ValueError as error:
            return str(error)[:300]
        constraint.output = tokens
        constraint.go_to(len(tokens))
        constraint.output = ()
        return constraint


def serve(connection: socket.socket, child: Child) -> None:
    """The child's loop, until the engine closes the connection. The kernel ends the child in messages that take too
    long."""
    frames, start = Frames(to_child), _resident()
    connection.sendall(frame(ChildReady(os.getpid())))
    while data := connection.recv(CHUNK):
        messages: list[ToChild] = [*frames.feed(data)]
        if not messages:
            continue
        limit = FOLLOWING + sum(OPENING if isinstance(message, Open) else EACH for message in messages)
        signal.setitimer(signal.ITIMER_PROF, limit)
        before = time.process_time()
        followed, masks = child.answer(messages)
        connection.sendall(b"".join(map(frame, followed)))  # steps wait for these
        answers: list[FromChild] = [*masks(), CpuTime(time.process_time() - before)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(b"".join(map(frame, answers)))
        if _resident() - start > GROWN:
            connection.sendall(frame(Leaving()))
            return


def _resident() -> int:
    """The memory of this process, where the system tells."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def main() -> None:
    """Read the vocabulary, then fork a child for each socket that arrives, until the engine closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    connection = socket.socket(fileno=int(sys.argv[1]))
    directory, vocab_size, eos_ids = sys.argv[2], int(sys.argv[3]), [*map(int, sys.argv[4:])]
    grammars = Grammars(Tokenizer.from_pretrained(directory), vocab_size, eos_ids)
    assert grammars.vocabulary
    while True:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            connection.close()
            status = 1
            try:
                os.nice(NICENESS)
                limit_memory(MEMORY)
                with contextlib.suppress(ConnectionError):  # the engine has gone
                    serve(socket.socket(fileno=descriptors[0]), Child(grammars, vocab_size))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(descriptors[0])


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # the engine has gone
        main()
