"""A router's end of KV events, by pyzmq and plain msgpack: what it would know of an engine's cache."""

from pathlib import Path
from typing import Any

import msgspec
import zmq

PATIENCE = 20_000  # milliseconds
Message = tuple[int, float, list[dict[str, Any]], int]  # number, time, events, rank


class Subscriber:
    def __init__(self, directory: Path, topic: str = "") -> None:
        """Hear of an engine whose sockets are files in this directory."""
        self.context, self.topic = zmq.Context(), topic.encode()
        self.live, self.missed = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket, name in ((self.live, "events"), (self.missed, "replay")):
            socket.linger, socket.rcvtimeo = 0, PATIENCE
            socket.connect(f"ipc://{directory}/{name}")
        self.live.subscribe(topic)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy()

    def receive(self) -> tuple[bytes, Message]:
        """The topic and the content of the next message."""
        topic, number, batch = self.live.recv_multipart()
        return topic, (int.from_bytes(number, "big"), *msgspec.msgpack.decode(batch))

    def replay(self, first: int) -> list[Message]:
        """The messages from this number on."""
        self.missed.send_multipart((b"", first.to_bytes(8, "big")))
        messages: list[Message] = []
        while True:
            empty, topic, number, batch = self.missed.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert (topic, batch) == (b"", b"")
                return messages
            assert topic.startswith(self.topic)
            messages.append((int.from_bytes(number, "big"), *msgspec.msgpack.decode(batch)))


def config(directory: Path, **more: Any) -> dict[str, Any]:
    """`kv_events_config` of an engine that a Subscriber can hear."""
    return {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay", **more}


def cached(messages: list[Message]) -> set[int]:
    """The blocks that are cached after these messages."""
    blocks = set[int]()
    for _, _, events, _ in messages:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    blocks |= {*event["block_hashes"]}
                case "BlockRemoved":
                    blocks -= {*event["block_hashes"]}
                case "AllBlocksCleared":
                    blocks.clear()
    return blocks
