"""The processes that follow grammars: a parent that has the vocabulary, and a child for each client of the server.

A grammar is a program that a client sends. It may take seconds to compile, gigabytes to follow, or overflow the stack
of llguidance. So it runs in a child, which the kernel ends at a limit of memory or of processor time, and which only
its client waits for. A child is forked in milliseconds from a parent that has the vocabulary in memory.

    engine -> Batch -> Constraint (phase 2) -> ForcedTokens, Masks -> engine
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from phase0_request.batch import GRAMMAR_REFUSED, Forced
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.sampling.constraints import Constraint, Grammars, fill_masks
from phase6_integration.process.messages import CHUNK, Frames, frame
from phase6_integration.process.tokenizer_worker import limit_memory
from phase6_integration.wings.structured.client_grammars import ClientGrammars

MEMORY = 512 << 20  # bytes that a child may allocate beyond what its parent has
GROWN = 192 << 20  # bytes after which a child is replaced: the next one begins without what this one has kept
COMPILING = 2.0  # seconds of processor time to compile a grammar
FOLLOWING, EACH = 0.25, 0.01  # and to follow some: for all, and for each more
NICENESS = 10  # the model comes first


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """Forget the output of a request from token `start` on, and follow these tokens there."""

    key: int  # of the request, for its life
    start: int
    tokens: list[int]
    forces: bool  # whether the tokens that the last one forces are asked for, and followed too
    params: SamplingParams | None  # of a request that the child does not know yet


class Batch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To a child: follow outputs, and make the mask behind each. The answers are a ForcedTokens and a Masks."""

    follow: list[Follow]
    ended: list[int]  # requests to be forgotten


class ForcedTokens(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child: what follows the tokens of a batch in any case, by request. Steps wait for these."""

    forced: Mapping[int, Forced]


class Masks(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From a child: the masks of a batch. Without any it is a child's first message: it has begun."""

    bits: Mapping[int, bytes] = {}  # by request
    errors: Mapping[int, str] = {}  # why a request has no mask
    seconds: float = 0.0  # of processor time, for the whole batch
    leaves: bool = False  # the child has grown too large, and ends


to_child: "msgspec.msgpack.Decoder[Batch]" = msgspec.msgpack.Decoder(Batch)
from_child: "msgspec.msgpack.Decoder[ForcedTokens | Masks]" = msgspec.msgpack.Decoder(ForcedTokens | Masks)


class Child:
    """Follows the grammars of one client."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._constraints: dict[int, Constraint | str] = {}  # or why there is none
        self._places: dict[int, int] = {}  # of the mask in the output, for each request of the batch

    def follow(self, batch: Batch) -> ForcedTokens:
        """Follow the tokens of a batch."""
        for key in batch.ended:
            self._constraints.pop(key, None)
        self._places, forced = {}, {}
        for message in batch.follow:
            if message.params is not None:
                self._constraints[message.key] = self._open(message.params)
            constraint, place = self._constraints[message.key], message.start + len(message.tokens)
            if isinstance(constraint, Constraint):
                constraint.go_to(message.start)
                for index, token in enumerate(message.tokens, message.start):
                    constraint.take(index, token)
                if message.forces:
                    forced[message.key] = constraint.forced(place - 1) or Forced()
                    place += len(forced[message.key].tokens)
            self._places[message.key] = place
        return ForcedTokens(forced)

    def masks(self) -> Masks:
        """Make the masks of the batch that was followed."""
        rows: list[tuple[Constraint, int]] = []
        errors, keys = {}, []
        for key, place in self._places.items():
            constraint = self._constraints[key]
            if isinstance(constraint, str):
                errors[key] = constraint
            else:
                keys.append(key)
                rows.append((constraint, place))
        filled = fill_masks(rows, self._vocab_size)
        errors |= {key: error for key, (constraint, _) in zip(keys, rows, strict=True) if (error := constraint.error)}
        return Masks({key: bits.tobytes() for key, bits in zip(keys, filled, strict=True)}, errors)

    def _open(self, params: SamplingParams) -> Constraint | str:
        try:
            return Constraint(Request("", (0,), params), self._vocab_size, self._grammars)
        except ValueError as error:
            return f"{GRAMMAR_REFUSED}: {error}"[:400]


def serve(connection: socket.socket, child: Child) -> None:
    """The child's loop, until the engine closes the connection. The kernel ends the child in a batch that takes too
    long."""
    frames, begin = Frames(to_child), _resident()
    connection.sendall(frame(Masks()))
    while data := connection.recv(CHUNK):
        for batch in frames.feed(data):
            new = sum(message.params is not None for message in batch.follow)
            signal.setitimer(signal.ITIMER_PROF, FOLLOWING + COMPILING * new + EACH * len(batch.follow))
            before = time.process_time()
            connection.sendall(frame(child.follow(batch)))
            masks = child.masks()
            signal.setitimer(signal.ITIMER_PROF, 0)
            leaves = _resident() - begin > GROWN
            seconds = time.process_time() - before
            connection.sendall(frame(Masks(masks.bits, masks.errors, seconds, leaves)))


def _resident() -> int:
    """The memory of this process, where the system tells."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def main(arguments: Sequence[str]) -> None:
    """Read the vocabulary, then fork a child for each socket that arrives, until the engine closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    connection = socket.socket(fileno=int(arguments[0]))
    directory, vocab_size, eos_ids = arguments[1], int(arguments[2]), [*map(int, arguments[3:])]
    grammars = ClientGrammars(Tokenizer.from_pretrained(directory), vocab_size, eos_ids)
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
        main(sys.argv[1:])
