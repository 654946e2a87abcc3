"""KV events: the blocks that enter and leave the prefix cache, published to routers in vLLM's format over ZeroMQ.

A PUB socket sends one message for each step that changed the cache. It has three frames: topic, message number in 8
bytes (big-endian), and a batch of events in msgpack. A subscriber that has missed numbers asks a ROUTER socket for
them: it sends the first number it wants, and gets the messages from there on, followed by one with number -1. Numbers
start at the time, so a restarted engine continues with higher ones. Subscribers then see a gap, ask for the missing
messages, and get an event that clears the cache. Numbers that started at 0 again would look old.

Sending never waits. ZeroMQ keeps up to `hwm` messages for a slow subscriber and then drops further ones; the subscriber
sees that numbers are missing. It can ask for the newest `buffer_steps` messages.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from phase0_request.core import CoreObserver, Step
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import CacheObserver
from phase4_radix.extras.block_hashes import BlockHashes
from phase4_radix.prefix_cache import PrefixCache
from phase6_integration.extras.kv_events.kv_events_options import KVEventsConfig

MEDIUM = "GPU"  # in vLLM's words the memory that steps read, here also that of a CPU
NUMBER_BYTES = 8
END = b"", (-1).to_bytes(NUMBER_BYTES, "big", signed=True), b""  # behind the last message that was asked for


# region events
class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are cached, each following the one before it. `lora_id` and `lora_name` exist for vLLM's readers."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block begins a prefix
    token_ids: Sequence[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str] | None] | None = None  # by block: the salt, in the first of a prefix
    cache_salt: str | None = None  # the same for all blocks, as SGLang sends it and Dynamo reads it


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is cached: the engine has just started."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The changes of one step, in order."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


# endregion


class KVEventPublisher(CacheObserver, CoreObserver):
    """Observes a prefix cache, and publishes the blocks that enter and leave it in one batch per step."""

    def __init__(self, cache: PrefixCache, config: KVEventsConfig) -> None:
        self._hashes = BlockHashes(cache.page_size)
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = config.topic.encode()
        self._number = time.time_ns() // 1000  # in microseconds, less than a step takes
        self._sent: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # of `_sent`
        self._context = zmq.Context()
        self._socket = self._open(zmq.PUB, config.endpoint, config.hwm)
        if config.replay_endpoint is not None:
            replay = self._open(zmq.ROUTER, config.replay_endpoint, 2 * config.buffer_steps)
            threading.Thread(target=self._serve_replays, args=(replay,), name="kv-replay", daemon=True).start()
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        self.flush()
        cache.observers.append(self)

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        """Bind a socket to an address of this machine (a wildcard, loopback, a file); connect it to any other."""
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = 0
        own = "*", "::", "//127.", "//0.0.0.0:", "//localhost:", "ipc://"
        here = kind == zmq.ROUTER or any(part in endpoint for part in own)
        try:
            socket.bind(endpoint) if here else socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(f"kv_events_config: {endpoint} cannot be opened: {error}") from None
        return socket

    # Called by the cache.

    def stored(self, parent: int | None, pages: Sequence[int], tokens: Sequence[int], salt: str) -> None:
        before = None if parent is None else self._hashes.by_page[parent]
        hashes = self._hashes.stored(parent, pages, tokens, salt)
        keys: list[tuple[str] | None] | None = None
        if salt and parent is None:
            keys = [(salt,), *[None] * (len(pages) - 1)]
        size = self._hashes.page_size
        event = BlockStored(hashes, before, tokens, size, None, MEDIUM, None, keys, salt or None)
        self._events.append(event)

    def removed(self, pages: Sequence[int]) -> None:
        self._events.append(BlockRemoved(self._hashes.removed(pages), MEDIUM))

    # Called by the loop.

    def completed(self, step: Step) -> None:
        self.flush()

    def discarded(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Publish the events since the last call, if there are any."""
        if not self._events:
            return
        batch = self._encoder.encode(EventBatch(time.time(), self._events))
        message = self._topic, self._number.to_bytes(NUMBER_BYTES, "big"), batch
        self._number += 1
        self._events = []
        with self._lock:
            self._sent.append(message)
        self._socket.send_multipart(message)

    def close(self) -> None:
        """Close the sockets. Unsent messages are dropped."""
        self._socket.close()
        self._context.term()  # wakes the thread, and waits until it has closed its socket

    def _serve_replays(self, socket: zmq.Socket[bytes]) -> None:
        """Send what subscribers ask for, until the engine closes."""
        with socket:
            while True:
                try:
                    client, *request = socket.recv_multipart()
                    if len(request) != 2 or len(request[1]) != NUMBER_BYTES:  # the first frame is empty
                        continue
                    first = request[1]
                    with self._lock:
                        sent = [message for message in self._sent if message[1] >= first]
                    for message in (*sent, END):
                        socket.send_multipart((client, b"", *message))
                except zmq.ContextTerminated:
                    return
