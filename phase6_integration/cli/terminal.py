"""What a person reads on a terminal: a banner when the server is ready, and answers that are wrapped at words."""

import logging
import re
from datetime import UTC, datetime
from typing import IO, Any

from rich.cells import cell_len

from phase6_integration.logs import pairs


class HumanFormatter(logging.Formatter):
    """Time, level, message, and fields as name=value; of the record that says ready, what a person does next."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields, said = getattr(record, "fields", {}), record.message
        if said == "ready" and fields:
            said, fields = banner(fields), {}
        time = datetime.fromtimestamp(record.created, UTC)
        return f"{time:%H:%M:%S} {record.levelname.lower():7} {said} {pairs(fields)}".rstrip(" ")


def banner(ready: dict[str, Any]) -> str:
    url, size = ready["url"], ready["page_size"]
    slots = f"{ready['pages']:,} pages of {size} tokens, {ready['kv_cache_bytes'] / 2**20:,.0f} MiB"
    rows = {
        "open": f"{url} in a browser: a chat, and the engine step by step",
        "API": f"{url}/v1, as OpenAI's; also /v1/messages, /api/chat",
        "model": f"{ready['model']}, {ready['dtype']} on {ready['device']}, up to {ready['max_model_len']:,} tokens",
        "memory": slots,
        "stop": "Ctrl-C",
    }
    lines = "".join(f"\n  {name:<7} {words}" for name, words in rows.items())
    return f"ready in {ready['after']:.1f} s\n{lines}\n"


class Wrapping:
    """Writes parts of a text. A word that does not fit into the line begins the next one; one without an end waits."""

    def __init__(self, file: IO[str], width: int) -> None:
        self.file = file
        self.width = width
        self._column = 0
        self._word = ""
        self._spaces = ""

    def write(self, part: str) -> None:
        *whole, self._word = re.split(r"(\s+)", self._word + part)
        for piece in whole:
            self._put(piece)
        self.file.flush()

    def end(self) -> None:
        self._put(self._word)
        self._word = self._spaces = ""

    def _put(self, piece: str) -> None:
        if not piece.strip():  # white space, or nothing
            *lines, self._spaces = (self._spaces + piece).split("\n")
            if lines:
                self.file.write("\n" * len(lines))
                self._column = 0
            return
        wide = cell_len(piece)
        if self._column and self._column + len(self._spaces) + wide > self.width:
            self.file.write("\n")
            self._column, self._spaces = 0, ""
        self.file.write(self._spaces + piece)
        self._column += len(self._spaces) + wide
        self._spaces = ""
