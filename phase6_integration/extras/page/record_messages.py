"""The messages of the live record: the page sends Watch, and the engine answers in lines."""

import msgspec

from phase5_continuous.extras.record.lines import Line

NAME = "record"  # of these messages


class Watch(msgspec.Struct, frozen=True):
    """To the engine: start writing its record, or stop. If it writes already, add a snapshot for one more reader."""

    on: bool
    text: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_watch = msgspec.msgpack.Decoder(Watch).decode
decode_line = msgspec.msgpack.Decoder(Line).decode
