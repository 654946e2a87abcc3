"""GrammarWorker: compiles and follows the grammars of all clients, in a process of its own.

A grammar is a program that a client sends. It may take seconds to compile, gigabytes to follow, or overflow the stack
of llguidance. So it runs in a process that the kernel ends at a limit of memory or of processor time.

    engine -> FollowBatch -> Constraint (phase 2) -> Answers (forced tokens), Answers (masks) -> engine
"""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from phase0_request.params import GRAMMAR_REFUSED, SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.extras.grammar.constraints import Constraint, fill_masks
from phase2_prefill_decode.extras.grammar.grammar import Grammars
from phase2_prefill_decode.extras.outcome import Forced
from phase6_integration.extras.structured.client_grammars import ClientGrammars
from phase6_integration.process.messages import CHUNK, Frames, frame

MEMORY = 512 << 20  # bytes that a worker may allocate beyond the vocabulary
GROWN = 192 << 20  # bytes after which a worker is replaced: the next one begins without what this one has kept
COMPILING = 2.0  # seconds of processor time to compile a grammar
FOLLOWING, EACH = 0.25, 0.01  # and to follow some: for each mask of the longest draft, and for each mask of the batch
NICENESS = 10  # the model comes first


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """Forget a request's output from token `start` on, and follow these tokens there."""

    key: int  # identifies the request
    start: int
    tokens: list[int]
    wants_forced: bool  # also follow the tokens that the last one forces, and return them
    draft: list[int]  # behind all these; the mask behind each of its tokens is asked for as well
    params: SamplingParams | None  # of a request that the worker does not know yet


class FollowBatch(msgspec.Struct, array_like=True, frozen=True):
    """To the worker: follow outputs, and make the mask after each."""

    follow: list[Follow]
    ended: list[int]  # requests to be forgotten


class Answers(msgspec.Struct, array_like=True, frozen=True):
    """From the worker, by request. A batch gets two answers: first the forced tokens, which steps wait for, then the
    masks. An empty answer at the start says that the worker is ready."""

    forced: Mapping[int, Forced] = {}  # what follows the tokens in any case
    masks: Mapping[int, bytes] = {}  # one, and one behind each token of the draft
    errors: Mapping[int, str] = {}  # why a request has no mask
    seconds: float = 0.0  # of processor time, for the whole batch


to_worker = msgspec.msgpack.Decoder(FollowBatch)
from_worker = msgspec.msgpack.Decoder(Answers)


class GrammarWorker:
    """Follows grammars."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._constraints: dict[int, Constraint | str] = {}  # or why there is none
        self._places: dict[int, tuple[int, list[int]]] = {}  # of a request's mask in the output, and the draft there

    def follow(self, batch: FollowBatch) -> Answers:
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
                if message.wants_forced:
                    forced[message.key] = constraint.forced(place - 1) or Forced()
                    place += len(forced[message.key].tokens)
            self._places[message.key] = place, message.draft
        return Answers(forced)

    def masks(self) -> Answers:
        """Make the masks of the batch that was followed."""
        errors, places = dict[int, str](), dict[int, list[tuple[Constraint, int]]]()
        for key, (index, draft) in self._places.items():
            constraint = self._constraints[key]
            if isinstance(constraint, str):
                errors[key] = constraint
            else:
                places[key] = constraint.places(index, draft)
        bits = iter(fill_masks([*chain(*places.values())], self._vocab_size))
        masks = {key: b"".join(next(bits).tobytes() for _ in of_key) for key, of_key in places.items()}
        errors |= {key: row.error for key, ((row, _), *_) in places.items() if row.error is not None}
        return Answers(masks=masks, errors=errors)

    def _open(self, params: SamplingParams) -> Constraint | str:
        try:
            return Constraint(Request("", (0,), params), self._vocab_size, self._grammars)
        except ValueError as error:
            return f"{GRAMMAR_REFUSED}: {error}"[:400]


def serve(connection: socket.socket, worker: GrammarWorker) -> None:
    """The worker's loop, until the engine closes the connection or the worker has grown too large. The kernel ends the
    process in a batch that takes too long or too much memory."""
    frames, begin = Frames(to_worker), _memory()[1]
    connection.sendall(frame(Answers()))
    while data := connection.recv(CHUNK):
        for batch in frames.feed(data):
            new = sum(message.params is not None for message in batch.follow)
            masks = [1 + len(message.draft) for message in batch.follow]
            seconds = FOLLOWING * max(masks, default=1) + COMPILING * new + EACH * sum(masks)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            before = time.process_time()
            connection.sendall(frame(worker.follow(batch)))
            answers = worker.masks()
            signal.setitimer(signal.ITIMER_PROF, 0)
            seconds = time.process_time() - before
            connection.sendall(frame(msgspec.structs.replace(answers, seconds=seconds)))
            if _memory()[1] - begin > GROWN:
                return


def run(directory: str, vocab_size: int, eos_ids: Collection[int]) -> None:
    """The process: its standard input is the connection to the engine. `directory` has the tokenizer."""
    for number in (signal.SIGINT, signal.SIGTERM):  # requests that are being answered still need it
        signal.signal(number, signal.SIG_IGN)
    grammars = ClientGrammars(Tokenizer.from_pretrained(directory), vocab_size, eos_ids)
    assert grammars.vocabulary  # read now: it counts neither as memory nor as time of a grammar
    os.nice(NICENESS)
    _limit_memory()
    connection = socket.socket(fileno=0)
    with contextlib.suppress(ConnectionError):
        serve(connection, GrammarWorker(grammars, vocab_size))
    os._exit(0)  # at once: the engine kills what has closed its connection


def _limit_memory() -> None:
    """Limit the address space, where the system can. No core is dumped."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mapped := _memory()[0]:
        with contextlib.suppress(ValueError):  # the limit is lower already
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def _memory() -> tuple[int, int]:
    """The bytes that this process has mapped, and the bytes it has in memory. Zeros where there is no /proc."""
    with contextlib.suppress(OSError):
        mapped, resident, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return mapped * resource.getpagesize(), resident * resource.getpagesize()
    return 0, 0
