"""Offers: a request that would rather be of another protocol is read as the HTTP/1.1 that it is.

`Upgrade: h2c` comes with every request of some clients, those of Java among them, and a server may pass over it.
httptools does not: for it the message ends with its head, and the body is a matter of the other protocol.
"""

import contextlib
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser

FRAMING = (b"content-length", b"transfer-encoding")


class OfferlessParser:
    """In the place of httptools' parser. A head that offers another protocol and has a body is read twice, the second
    time without the offer and in silence; then comes the body."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing = b""  # the headers that say where the body ends
        self._silent = False
        self.on_body = protocol.on_body
        self._parser = parser = HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # an older httptools has none to set
            parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn would
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive

    def close(self) -> None:
        """Let go of everything: a parser and whom it calls hold each other, until a collection finds them."""
        self.__dict__.clear()

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                return self._parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            if self._framing:
                head = b"POST * HTTP/1.1\r\n" + self._framing + b"\r\n"
                self._framing, self._silent = b"", True
                self._parser.feed_data(head)
                self._silent = False
        return None

    # What httptools calls.

    def on_message_begin(self) -> None:
        if not self._silent:
            self._framing = b""
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._silent:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._silent:
            if name.lower() in FRAMING:
                self._framing += b"%s: %s\r\n" % (name, value)
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._silent:
            if not self._parser.should_upgrade():
                self._framing = b""
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._framing:  # else its body is yet to come
            self._protocol.on_message_complete()
