"""What the two sides of the live record say to each other: the page asks by Watch, the engine answers in lines."""

import msgspec

from phase5_continuous.extras.record.lines import Line

NAME = "record"  # of these messages


class Watch(msgspec.Struct, frozen=True):
    """To the engine: write its record from now on, or, if it does, a snapshot for one more reader; or stop."""

    on: bool
    text: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_watch = msgspec.msgpack.Decoder(Watch).decode
decode_line = msgspec.msgpack.Decoder(Line).decode
